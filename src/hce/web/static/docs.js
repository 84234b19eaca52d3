// The description of the API, made from /openapi.json.

import { $, el, fill } from "./dom.js";

// Text between backticks is code.
const prose = (text = "") => text.split("`").map((part, place) => (place % 2 ? el("code", {}, part) : part));

const limits = (schema = {}) => Object.entries(schema)
  .filter(([name]) => ["default", "minimum", "maximum", "minLength", "maxLength", "maxItems", "minItems"].includes(name))
  .map(([name, value]) => `${name} ${JSON.stringify(value)}`).join(", ");

function typeOf(schema = {}) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return schema.type || "any";
}

const row = (name, type, about) => el("tr", {}, el("td", { class: "mono" }, name), el("td", {}, type), el("td", { class: "soft" }, about));

function fieldsOf(name, schema) {
  const rows = Object.entries(schema.properties || {}).map(([field, each]) => row(field, typeOf(each), [each.description, limits(each)].filter(Boolean).join("; ")));
  return el("article", { id: name }, el("h3", {}, name), el("p", { class: "soft" }, prose((schema.description || "").split("\n\n")[0])), el("table", {}, el("tbody", {}, rows)));
}

function operation(path, method, facts) {
  const parameters = (facts.parameters || []).map((each) => row(`${each.name}${each.required ? "" : "?"}`, typeOf(each.schema), [each.description, limits(each.schema)].filter(Boolean).join("; ")));
  const body = facts.requestBody ? typeOf(facts.requestBody.content["application/json"].schema) : null;
  const good = Object.entries(facts.responses).find(([code]) => code.startsWith("2"));
  const content = good?.[1].content?.["application/json"];
  const given = good ? (content ? typeOf(content.schema) : "bytes") : null;
  const link = (name) => (name === "bytes" ? name : el("a", { href: `#${name.replace("list of ", "")}` }, name));
  return el("article", {},
    el("h3", { class: "mono" }, el("span", { class: "verb" }, method.toUpperCase()), path),
    el("p", {}, prose(facts.description)),
    parameters.length ? el("table", {}, el("tbody", {}, parameters)) : null,
    el("p", { class: "soft" }, body ? ["takes ", link(body), ", "] : null, given ? ["returns ", link(given)] : null));
}

const api = await (await fetch("/openapi.json")).json();
const operations = Object.entries(api.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, facts]) => operation(path, method, facts)));
const types = Object.entries(api.components.schemas).filter(([name]) => !name.includes("Validation")).map(([name, schema]) => fieldsOf(name, schema));
const example = `curl '${location.origin}/api/search?q=some+text&k=3'
curl -X POST ${location.origin}/api/documents -H 'Content-Type: application/json' \\
     -d '{"documents": [{"id": "a", "text": "a new document"}]}'
curl -X DELETE ${location.origin}/api/documents/a`;
fill($("api"), el("h2", {}, api.info.title), api.info.description.split("\n\n").map((text) => el("p", { class: "soft" }, prose(text))), el("pre", {}, el("code", {}, example)),
  operations, el("h2", { class: "section-title" }, "Types"), types);
