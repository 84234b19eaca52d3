// Filters by metadata. A field with few values has buttons with counts, numbers have a range, other fields are behind
// "more". A filter writes its condition to the "where" input, which holds all conditions.

import { get } from "./api.js";
import { $, breakable, count, el, fill, plural, spelled } from "./dom.js";

const FIELDS = 4; // rows shown
const MORE_FIELDS = 8; // rows behind "more"
const FEW = 60; // a field with more distinct values gets no buttons
const VALUES = 8; // buttons per field, for its most frequent values; numeric fields with more values get a range
const CLAUSE_CHARACTERS = 120;
const SIGN = /[=<>!~]+|\s(?:not )?in\s/;

let counted = ""; // the fields and conditions of the counts on the page
let isOpen = false; // whether "more" is open

export const clausesOf = (text) => text.split(";").map((each) => each.trim()).filter(Boolean);

// Sort the fields into those with few values, ranges of numbers, and others; skip fields whose values hardly repeat.
function sorted(fields) {
  const named = fields.filter((field) => canBeNamed(field.name));
  const ranges = named.filter((field) => field.least !== null && field.values > VALUES);
  const repeated = named.filter((field) => !ranges.includes(field) && 3 * field.values <= 2 * field.documents);
  const isFew = (field) => field.values > 1 && field.values <= FEW && 2 * field.values <= field.documents;
  const few = repeated.filter(isFew).slice(0, FIELDS);
  return { few, ranges: ranges.slice(0, FIELDS), more: repeated.filter((field) => !few.includes(field)).slice(0, MORE_FIELDS) };
}

// Return example conditions on fields of this index.
export function exampleOf(fields) {
  const { few, ranges, more } = sorted(fields);
  const value = [...few, ...more].find((field) => canBeWritten({ value: field.example, clause: `${field.name}=${field.example}` }) && String(field.example).length < 20);
  const parts = [value ? `${value.name}=${value.example}` : "", ranges.length ? `${ranges[0].name}>=${ranges[0].example}` : ""];
  return parts.filter(Boolean).join("; ");
}

// Counts depend on the conditions, not on the query, so they are fetched once, after the hits.
export async function showFacets(q, fields, signal, onChange) {
  const clauses = clausesOf($("where").value);
  const { few, ranges, more } = sorted(fields);
  const key = JSON.stringify([fields, clauses, isOpen]);
  if (key === counted) return;
  if (!few.length && !ranges.length && !more.length) return hideFacets();
  const asked = [...few, ...(isOpen ? more : [])].map((field) => field.name);
  const { facets } = asked.length ? await get("/api/search", { q, k: 1, mode: "words", where: clauses, facet: asked }, signal) : { facets: {} };
  if (signal.aborted) return;
  const rows = (some) => some.map(({ name }) => rowOf(name, facets[name], clauses, onChange)).filter(Boolean);
  const focused = $("facets").contains(document.activeElement) ? document.activeElement.dataset.clause : null;
  fill($("facets"), rows(few), ranges.map((field) => rangeOf(field, clauses, onChange)), more.length ? folded(rows(isOpen ? more : []), more, () => showFacets(q, fields, signal, onChange)) : null);
  $("facets").hidden = false;
  counted = key;
  const again = Array.from($("facets").querySelectorAll("[data-clause]")).find((each) => each.dataset.clause === focused);
  if (again) again.focus();
}

export function hideFacets() {
  $("facets").hidden = true;
  forgetFacets();
}

// After a write, count again with the next search.
export function forgetFacets() {
  counted = "";
}

// The fields behind "more", counted when it is opened.
function folded(rows, fields, look) {
  const names = fields.map((field) => field.name).join(", ");
  const toggle = (event) => { event.preventDefault(); isOpen = !isOpen; look(); };
  return el("details", { open: isOpen }, el("summary", { "data-clause": "more", onclick: toggle }, isOpen ? "less" : `more: ${names}`), rows);
}

function canBeNamed(name) {
  return /^(?:[^=<>!~;"\\\s\p{C}]| )+$/u.test(name) && !SIGN.test(name) && name === name.trim() && name.length <= CLAUSE_CHARACTERS;
}

const without = (field) => clausesOf($("where").value).filter((clause) => partsOf(clause).field !== field);

function rowOf(field, values, clauses, onChange) {
  const buttons = values.map((facet) => ({ ...facet, clause: `${field}=${facet.value}` })).filter(canBeWritten).slice(0, VALUES);
  const chosen = clauses.map(partsOf).filter((each) => each.field === field && each.sign === "=").map((each) => each.value);
  const isChosen = ({ value }) => chosen.includes(String(value));
  if (!buttons.some((each) => each.documents > 1 || isChosen(each))) return null;
  return el("div", { class: "facet", role: "group", "aria-label": field }, el("span", {}, breakable(field)), el("div", { class: "values" }, buttons.map((each) => {
    const isPressed = isChosen(each);
    const choose = () => onChange([...without(field), ...(isPressed ? [] : [each.clause])].join("; "));
    return el("button", { class: "step", "aria-pressed": String(isPressed), "data-clause": each.clause, onclick: choose,
      title: isPressed ? "any value" : `only ${plural(each.documents, "document")} with ${each.clause}` },
    spelled(each.value), el("small", {}, count(each.documents)));
  })));
}

// A range of numbers; an empty end sets no condition.
function rangeOf({ name, least, most }, clauses, onChange) {
  const given = (sign) => clauses.map(partsOf).find((each) => each.field === name && each.sign === sign)?.value ?? "";
  const end = (sign, label, at) => el("input", { type: "number", step: "any", value: given(sign), placeholder: String(at), "aria-label": `${name} ${label}`, "data-clause": `${name}${sign}`, onchange: () => change() });
  const [from, to] = [end(">=", "from", least), end("<=", "to", most)];
  const change = () => onChange([...without(name), ...[[">=", from], ["<=", to]].filter(([, input]) => input.value !== "").map(([sign, input]) => `${name}${sign}${input.value}`)].join("; "));
  return el("div", { class: "facet", role: "group", "aria-label": name }, el("span", {}, breakable(name)), el("div", { class: "values range" }, from, "to", to));
}

// Whether the "where" input can hold a value: semicolons separate conditions, and spaces around a value are dropped.
function canBeWritten({ value, clause }) {
  const text = String(value);
  const isJoined = /\s(?:or|and|\|\||&&)\s.*[=<>]/i.test(text); // it would be parsed as two conditions
  return text && text === text.trim() && !isJoined && !/[;\p{C}]/u.test(text) && clause.length <= CLAUSE_CHARACTERS;
}

function partsOf(clause) {
  const found = SIGN.exec(clause);
  if (!found) return { field: clause, sign: "", value: "" };
  return { field: clause.slice(0, found.index).trim(), sign: found[0].trim(), value: clause.slice(found.index + found[0].length).trim() };
}
