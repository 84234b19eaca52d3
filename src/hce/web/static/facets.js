// Facets: values of the hits' metadata fields as buttons, with how many documents have each; a click sets the condition.

import { get } from "./api.js";
import { $, breakable, count, el, fill, plural, spelled } from "./dom.js";

const FIELDS = 4; // rows shown
const FIELDS_ASKED = 8; // of these some have another value in each document, which is nothing to choose by
const VALUES = 8;
const CLAUSE_CHARACTERS = 120;
const SIGN = /[=<>!~]+|\s(?:not )?in\s/;

let counted = ""; // the fields and conditions whose counts are on the page

export const clausesOf = (text) => text.split(";").map((each) => each.trim()).filter(Boolean);

// Counts depend on the conditions and not on the query: they are asked for once, and no hit waits for them.
export async function showFacets(q, hits, signal, onChange) {
  const clauses = clausesOf($("where").value);
  const fields = [...new Set(hits.flatMap((hit) => fieldsOf(hit.metadata)))].slice(0, FIELDS_ASKED);
  const key = JSON.stringify([fields, clauses]);
  if (key === counted) return;
  if (!fields.length) return hideFacets();
  const { facets } = await get("/api/search", { q, k: 1, mode: "words", where: clauses, facet: fields }, signal);
  if (signal.aborted) return;
  const rows = fields.map((field) => rowOf(field, facets[field], clauses, onChange)).filter(Boolean).slice(0, FIELDS);
  const focused = $("facets").contains(document.activeElement) ? document.activeElement.dataset.clause : null;
  fill($("facets"), rows);
  $("facets").hidden = !rows.length;
  counted = key;
  const again = Array.from($("facets").querySelectorAll("button")).find((button) => button.dataset.clause === focused);
  if (again) again.focus();
}

export function hideFacets() {
  $("facets").hidden = true;
  forgetFacets();
}

// After a write, the next answer counts anew.
export function forgetFacets() {
  counted = "";
}

// Fields that a condition can name, those within a field with a dot.
function fieldsOf(metadata, before = "") {
  return Object.entries(metadata).flatMap(([name, value]) => {
    const isNested = value && typeof value === "object" && !Array.isArray(value);
    if (!canBeNamed(name) || ((before || isNested) && name.includes("."))) return [];
    return isNested ? fieldsOf(value, `${before}${name}.`) : [`${before}${name}`];
  });
}

function canBeNamed(name) {
  return /^(?:[^=<>!~;"\\\s\p{C}]| )+$/u.test(name) && !SIGN.test(name) && name === name.trim() && name.length <= CLAUSE_CHARACTERS;
}

function rowOf(field, values, clauses, onChange) {
  const buttons = values.map((facet) => ({ ...facet, clause: `${field}=${facet.value}` })).filter(canBeWritten).slice(0, VALUES);
  const chosen = clauses.map(partsOf).filter((each) => each.field === field && each.sign === "=").map((each) => each.value);
  const isChosen = ({ value }) => chosen.includes(String(value));
  if (!buttons.some((each) => each.documents > 1 || isChosen(each))) return null;
  return el("div", { class: "facet", role: "group", "aria-label": field }, el("span", {}, breakable(field)), el("div", { class: "values" }, buttons.map((each) => {
    const isPressed = isChosen(each);
    const others = () => clausesOf($("where").value).filter((clause) => partsOf(clause).field !== field);
    const choose = () => onChange([...others(), ...(isPressed ? [] : [each.clause])].join("; "));
    return el("button", { class: "step", "aria-pressed": String(isPressed), "data-clause": each.clause, onclick: choose,
      title: isPressed ? "any value" : `only ${plural(each.documents, "document")} with ${each.clause}` },
    spelled(each.value), el("small", {}, count(each.documents)));
  })));
}

// Whether the line of conditions can hold a value: semicolons part conditions, and blanks around a value are cut off.
function canBeWritten({ value, clause }) {
  const text = String(value);
  const isJoined = /\s(?:or|and|\|\||&&)\s.*[=<>]/i.test(text); // which would be two conditions
  return text && text === text.trim() && !isJoined && !/[;\p{C}]/u.test(text) && clause.length <= CLAUSE_CHARACTERS;
}

function partsOf(clause) {
  const found = SIGN.exec(clause);
  if (!found) return { field: clause, sign: "", value: "" };
  return { field: clause.slice(0, found.index).trim(), sign: found[0].trim(), value: clause.slice(found.index + found[0].length).trim() };
}
