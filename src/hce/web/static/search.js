// Search as you type: debounced, late answers dropped, before and after training side by side.

import { get } from "./api.js";
import { $, bar, breakable, count, el, fill, filledIn, marked, nameOf, plural, titleOf, treeIcon, valueOf } from "./dom.js";
import { clausesOf, forgetFacets, hideFacets, showFacets } from "./facets.js";
import { stepsOf } from "./way.js";

const WAIT = 160; // milliseconds from the last key to the search
const AGAIN = 700; // milliseconds between two searches while the untrained encoder prepares

let page;
let timer;
let again;
let asking = null;
let asked = 0;
let shown = ""; // the query whose path down the tree is shown

export function start(owner) {
  page = owner;
  $("q").addEventListener("input", () => later(WAIT));
  $("where").addEventListener("input", () => later(2 * WAIT));
  for (const id of ["k", "compare"]) $(id).addEventListener("change", () => later(0));
  for (const button of $("sides").children) button.addEventListener("click", () => showSide(button.dataset.side));
}

export function show(parameters) {
  const facts = page.facts;
  forgetFacets();
  $("compare-option").hidden = !facts || facts.untrained.state === "off";
  const q = parameters.get("q") || "";
  if ($("q").value.trim() !== q.trim()) $("q").value = q;
  const where = parameters.get("where") || "";
  if ($("where").value.trim() !== where.trim()) $("where").value = where;
  if (where) $("where").parentElement.hidden = false; // so that the user can clear it
  if (!matchMedia("(pointer: coarse)").matches && document.activeElement === document.body) $("q").focus();
  return run();
}

function later(wait) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    const query = new URLSearchParams();
    if ($("q").value.trim()) query.set("q", $("q").value);
    if ($("where").value.trim()) query.set("where", $("where").value);
    history.replaceState(null, "", `#search${query.size ? "?" : ""}${query}`);
    run();
  }, wait);
}

async function run() {
  const q = $("q").value.trim();
  const number = ++asked;
  clearTimeout(again);
  if (asking) asking.abort();
  if (!q) return showStart();
  if (shown !== q) hideWay();
  asking = new AbortController();
  const compare = !$("compare-option").hidden && $("compare").checked;
  const where = clausesOf($("where").value);
  const { signal } = asking;
  try {
    const answer = await get("/api/search", { q, k: $("k").value, where, compare }, signal);
    if (number !== asked) return; // a later search has begun
    showAnswer(answer);
    if (answer.before && answer.before.readiness.state === "preparing") again = setTimeout(run, AGAIN);
    showFacets(q, page.fields, signal, setWhere).catch(() => { if (!signal.aborted) hideFacets(); });
    if (!answer.hits.length) hideWay(); // it would lead to documents that the conditions exclude
    else if (page.facts && page.facts.index.tree_levels && shown !== q) await showWay(q, number);
  } catch (error) {
    if (error.name === "AbortError" || number !== asked) return;
    showProblem(error.message);
  }
}

function setWhere(text) {
  $("where").value = text;
  later(0);
}

function clear() {
  fill($("hits"));
  fill($("before-hits"));
  for (const id of ["before", "now-title", "sides", "judged"]) $(id).hidden = true;
  hideWay();
  hideFacets();
  $("results").classList.remove("two");
  $("summary").textContent = "";
}

function showProblem(message) {
  clear();
  fill($("start"), el("p", { class: "problem" }, message));
  $("start").hidden = false;
}

async function showStart() {
  clear();
  const facts = page.facts;
  if (!facts) return;
  $("start").hidden = false;
  const keys = el("p", { class: "keys wide-only" }, [["/", "search"], ["↓ ↑", "move through the hits"], ["Enter", "open"], ["t", "show in the tree"], ["Esc", "back"]]
    .map(([key, what]) => el("span", {}, el("kbd", {}, key), ` ${what}`)));
  if (!facts.index.documents) {
    fill($("start"), el("h2", {}, "No documents yet"), el("p", {}, facts.writable ? "Add the first one." : "Nothing to search."));
    return;
  }
  const title = el("h2", {}, `Search ${plural(facts.index.documents, "document")}`);
  const how = facts.untrained.state === "off" ? "Type what you mean, in your own words."
    : "Type what you mean, in your own words, and see what training changed.";
  fill($("start"), title, el("p", {}, how), keys);
  if (!facts.index.tree_levels) return;
  const answer = await get("/api/tree", { depth: 1, most: 9 });
  const topics = answer.tree.children.filter((node) => node.name.length).map((node) => {
    const look = () => { $("q").value = node.name.join(" "); $("q").focus(); later(0); };
    return el("button", { onclick: look }, node.name.join(" · "), el("small", {}, count(node.size)));
  });
  if (topics.length && !$("q").value) fill($("start"), title, el("p", {}, how), el("div", { class: "topics" }, topics), keys);
}

function showAnswer(answer) {
  $("start").hidden = true;
  const before = answer.before;
  const ready = before && before.readiness.state === "ready";
  const best = Math.max(...answer.hits.map((hit) => hit.score));
  fill($("hits"), answer.hits.map((hit) => hitOf(hit, ready ? movement(hit, answer.k) : null, scoreOf(hit, best))));
  $("results").classList.toggle("two", Boolean(before));
  for (const id of ["before", "sides", "now-title"]) $(id).hidden = !before;
  if (before) showBefore(answer, ready);
  const moves = ready && answer.hits.length ? summaryOf(answer) : "";
  $("judged").hidden = answer.good_match !== false;
  $("summary").textContent = `${plural(answer.hits.length, "hit")} · ${answer.milliseconds.toFixed(0)} ms${moves}`;
  if (!answer.hits.length) {
    const why = $("where").value.trim() ? "No document matches the conditions." : "There are no documents yet.";
    fill($("start"), el("p", {}, why));
    $("start").hidden = false;
    $("before").hidden = $("now-title").hidden = true;
  }
}

function showBefore(answer, ready) {
  const { readiness, hits } = answer.before;
  fill($("now-title"), el("b", {}, "After training"), ` · ${page.facts.index.encoder}`);
  fill($("before-title"), el("b", {}, "Before"), ` · ${readiness.encoder || ""}`);
  if (ready) {
    const now = new Map(answer.hits.map((hit) => [hit.id, hit.rank]));
    fill($("before-hits"), hits.map((hit) => hitOf(hit, whereNow(hit, now.get(hit.id), answer.k))));
  } else if (readiness.state === "preparing") {
    const share = readiness.total ? readiness.done / readiness.total : 0;
    fill($("before-hits"), el("li", { class: "preparing" }, "The untrained encoder is encoding the documents",
      readiness.total ? `: ${count(readiness.done)} of ${count(readiness.total)}.` : ".", bar(share)));
  } else {
    fill($("before-hits"), el("li", { class: "preparing" }, `No comparison: ${readiness.reason}.`));
  }
}

// The change of a hit's rank by training.
function movement(hit, k) {
  if (hit.before === null) return null;
  const up = hit.before - hit.rank;
  if (hit.before > k) return { kind: "new", text: "new", title: `rank ${count(hit.before)} before training` };
  if (up === 0) return { kind: "same", text: "=", title: "the same rank as before training" };
  return { kind: up > 0 ? "up" : "down", text: `${up > 0 ? "↑" : "↓"}${Math.abs(up)}`, title: `rank ${hit.before} before training` };
}

function whereNow(hit, rank, k) {
  if (rank === undefined) return { kind: "gone", text: "out", title: `not among the first ${k} after training` };
  if (rank === hit.rank) return { kind: "same", text: "=", title: "the same rank after training" };
  return { kind: "same", text: `→ ${rank}`, title: `rank ${rank} after training` };
}

function summaryOf(answer) {
  const kinds = answer.hits.map((hit) => (movement(hit, answer.k) || {}).kind);
  const counts = ["new", "up", "down"].map((kind) => [kinds.filter((each) => each === kind).length, kind]).filter(([number]) => number);
  return counts.length ? ` · ${counts.map(([number, kind]) => `${number} ${kind}`).join(", ")}` : " · same order as before";
}

// Scores of two encoders cannot be compared, so hits of the untrained one show only their ranks.
function scoreOf(hit, best) {
  return el("span", { class: "score", title: `${why(hit)}; the bar is its share of the best hit's score` }, bar(best > 0 ? hit.score / best : 0), hit.score.toFixed(3));
}

function hitOf(hit, moved, score = null) {
  const open = () => page.open(hit.id, hit.passage);
  const inTree = (event) => { event.stopPropagation(); page.go("tree", { id: hit.id }); };
  const title = titleOf(hit);
  const place = page.facts && page.facts.index.tree_levels
    ? el("button", { class: "icon", tabindex: "-1", onclick: inTree, title: "Show in the tree (t)", "aria-label": "Show in the tree" }, treeIcon()) : null;
  const row = el("li", { class: "hit", tabindex: "0", "data-id": hit.id, onclick: open },
    el("span", { class: "rank" }, String(hit.rank)),
    el("div", {},
      el("div", { class: "head" },
        el("h3", {}, title ? marked(title, hit.title_marks) : breakable(hit.id)),
        moved ? el("span", { class: `moved ${moved.kind}`, title: moved.title }, moved.text) : null,
        score,
        place),
      el("p", { class: "snippet" }, hit.snippet_start ? "… " : null, marked(hit.snippet, hit.snippet_marks), hit.snippet_is_whole ? null : " …"),
      title || hit.from_words || hit.from_tokens ? el("div", { class: "meta" }, scoreParts(hit), title ? el("span", { class: "mono" }, breakable(hit.id)) : null) : null,
      pathOf(hit),
      chipsOf(hit)));
  for (const [event, on] of [["mouseenter", true], ["mouseleave", false], ["focus", true], ["blur", false]]) {
    row.addEventListener(event, () => showTwins(hit.id, on));
  }
  return row;
}

// A hit's metadata, collapsed.
function chipsOf(hit) {
  const pieces = filledIn(hit.metadata).map(([name, value]) => el("span", { class: "chip" }, `${name} `, el("b", {}, valueOf(value))));
  if (!pieces.length) return null;
  const stay = (event) => event.stopPropagation();
  return el("details", { class: "chips", onclick: stay }, el("summary", { tabindex: "-1" }, plural(pieces.length, "field")), el("div", { class: "meta" }, pieces));
}

// The nodes of the tree above a hit, as links.
function pathOf(hit) {
  if (!hit.path.length) return null;
  const look = (node) => (event) => { event.stopPropagation(); page.go("tree", { level: node.level, node: node.node }); };
  return el("div", { class: "meta path" }, hit.path.flatMap((node, place) => [
    place ? el("span", { "aria-hidden": "true" }, "›") : null,
    el("button", { class: "link", tabindex: "-1", onclick: look(node) }, nameOf(node))]));
}

// The parts of the score from meaning, tokens and words, and the matched words.
function scoreParts(hit) {
  if (!hit.from_words && !hit.from_tokens) return null;
  const tokens = hit.from_tokens ? `+ tokens ${hit.from_tokens.toFixed(2)} ` : "";
  const words = hit.from_words ? `+ words ${hit.from_words.toFixed(2)} ` : "";
  return el("span", { class: "score-parts", title: why(hit) }, `meaning ${hit.from_meaning.toFixed(2)} ${tokens}${words}`,
    hit.from_words ? el("b", {}, hit.matched.join(" ") || "common words") : null);
}

function why(hit) {
  if (!hit.from_words && !hit.from_tokens) return "similarity in meaning";
  return "the parts of the score from meaning, and from words that the document shares with the query"
    + (hit.from_tokens ? "; tokens: how well tokens of the text match each token of the query" : "");
}

// The same document in the other column.
function showTwins(id, on) {
  for (const row of document.querySelectorAll(".hit")) {
    if (row.dataset.id === id && !$("before").hidden) row.classList.toggle("twin", on);
  }
}

async function showWay(q, number) {
  const answer = await get("/api/tree/path", { q });
  if (number !== asked) return;
  const look = () => page.go("tree", { q });
  const onMap = el("button", { class: "link", onclick: () => page.go("tree", { q, view: "map" }) }, "show on the map");
  fill($("way"), el("span", {}, "path down the tree"), stepsOf(answer.way, look), onMap);
  $("way").hidden = false;
  shown = q;
}

function hideWay() {
  $("way").hidden = true;
  shown = "";
}

function showSide(side) {
  $("results").dataset.side = side;
  for (const button of $("sides").children) button.setAttribute("aria-selected", String(button.dataset.side === side));
}

export function key(event) {
  const hit = event.target.closest(".hit");
  const isInput = event.target.id === "q";
  if (event.key === "Escape") {
    if (hit) $("q").focus();
    else if (isInput && $("q").value) { $("q").value = ""; later(0); }
    else if (isInput) $("q").blur();
    else return;
  } else if (event.key === "ArrowDown" && (isInput || event.target === document.body)) {
    (visible()[0] || $("q")).focus();
  } else if (hit && ["ArrowDown", "ArrowUp"].includes(event.key)) {
    const next = event.key === "ArrowDown" ? hit.nextElementSibling : hit.previousElementSibling;
    (next || (event.key === "ArrowUp" ? $("q") : hit)).focus();
  } else if (hit && ["ArrowLeft", "ArrowRight"].includes(event.key)) {
    const other = $(event.key === "ArrowRight" ? "before-hits" : "hits");
    const row = other.children[Array.from(hit.parentNode.children).indexOf(hit)];
    if (row && row.offsetParent) row.focus();
  } else if (hit && event.key === "Enter" && event.target === hit) {
    hit.click();
  } else if (hit && event.key === "t" && page.facts.index.tree_levels) {
    page.go("tree", { id: hit.dataset.id });
  } else {
    return;
  }
  event.preventDefault();
}

function visible() {
  return Array.from(document.querySelectorAll(".hit")).filter((row) => row.offsetParent);
}
