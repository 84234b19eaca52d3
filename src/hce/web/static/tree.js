// The tree as a treemap of a node and two levels below it, or as the map of all documents. A list next to it shows the
// same, and the path of a query or document is above it.

import { get } from "./api.js";
import { $, bar, breakable, count, el, fill, nameOf, plural, titleOf, toast } from "./dom.js";
import * as map from "./map.js";
import { branchHue, colour, config, font, frame, isDark, onTheme, plain, plotly } from "./plots.js";
import { stepsOf } from "./way.js";

const MOST = 48; // children of a node to draw
const STEP = 550; // milliseconds between two levels of an animated path
const SIZE = 11; // font size, in pixels
const LINE = 1.3 * SIZE;
const HITS = 10; // hits of a query on the map

let page;
let picture = "treemap"; // or "map"
let answer = null; // the shown node
let way = null; // the shown path: its steps, and how many are highlighted
let number = 0; // number of the last request, to drop late answers
let timer;
let typing;
const hues = new Map(); // hues of the nodes of level 1, by number, so that a branch keeps its color

export function start(owner) {
  page = owner;
  map.start(page, go);
  for (const button of $("pictures").children) button.addEventListener("click", () => go(new URLSearchParams(location.hash.split("?")[1]), button.dataset.picture));
  $("tree-q").addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      const q = $("tree-q").value.trim();
      const parameters = addressed(q ? { q } : {}, picture);
      history.replaceState(null, "", parameters.size ? `#tree?${parameters}` : "#tree");
      show(parameters);
    }, 250);
  });
  $("tree-q").addEventListener("keydown", (event) => {
    if (event.key === "Escape") { $("tree-q").value = ""; $("tree-q").dispatchEvent(new Event("input")); }
  });
  onTheme(() => { if (answer && !$("tree").hidden) { if (picture === "map") map.redraw(); else draw(); } });
}

// The address says whether the treemap or the map is shown.
function addressed(parameters, shown) {
  const query = new URLSearchParams(parameters);
  query.delete("view");
  if (shown === "map") query.set("view", "map");
  return query;
}

const go = (parameters = {}, shown = picture) => page.go("tree", addressed(parameters, shown));

export async function show(parameters) {
  const own = ++number;
  clearTimeout(timer);
  if (page.facts && !page.facts.index.tree_levels) return showNone();
  showPicture(parameters.get("view") === "map" ? "map" : "treemap");
  const [q, id] = [parameters.get("q"), parameters.get("id")];
  if (document.activeElement !== $("tree-q")) $("tree-q").value = q || "";
  way = null;
  $("tree-way").hidden = true;
  const level = Number(parameters.get("level") || 0);
  const node = Number(parameters.get("node") || 0);
  if (!q && !id) return visit(level, node, 0, own);
  const found = await get("/api/tree/path", q ? { q } : { id });
  if (own !== number) return;
  way = { ...found.way, lit: 0, id };
  const what = id ? (way.came_later ? "added after the tree was grown; position" : "position of the document") : "path of the query";
  const open = id ? el("button", { class: "link", onclick: () => page.open(id) }, id) : null;
  fill($("tree-way"), el("span", {}, what, " ", open), stepsOf(way, (step) => go({ level: step.level, node: step.node })));
  $("tree-way").hidden = false;
  if (picture === "map") return showFound(q, id, own);
  await visit(0, 0, 0, own);
  await light(own);
}

function showPicture(shown) {
  picture = shown;
  for (const button of $("pictures").children) button.setAttribute("aria-pressed", String(button.dataset.picture === shown));
  for (const name of ["treemap", "map"]) $(name).hidden = name !== shown;
}

// Show a query with its hits, or a document, on the map, with the full path highlighted.
async function showFound(q, id, own) {
  way.lit = way.steps.length;
  for (const chip of document.querySelectorAll("#tree-way .step")) chip.classList.add("lit");
  answer = await get("/api/tree", { level: 0, node: 0, depth: 1, most: MOST });
  if (own !== number) return;
  crumbs();
  const hits = q ? (await get("/api/search", { q, k: HITS })).hits : [];
  if (own !== number) return;
  if (q) listHits(hits);
  else await listLeaf(way.steps.at(-1), own);
  if (await loaded(own)) await map.showFound(q, hits, id, () => own === number);
}

function loaded(own) {
  $("picture-loading").hidden = true;
  return map.load(() => own === number);
}

function showNone() {
  $("pictures").hidden = true;
  $("tree-q").parentElement.hidden = true;
  document.querySelector(".explorer").hidden = true;
  fill($("crumbs"), el("div", { class: "empty" }, el("h2", {}, "This index has no tree"),
    el("p", {}, "Make the index again with ", el("code", {}, "hce index"), " without ", el("code", {}, "--no-tree"), ".")));
}

// Highlight the next level; if the treemap does not reach it, go down first.
async function light(own) {
  if (own !== number || !way || way.lit >= way.steps.length) return;
  const step = way.steps[way.lit++];
  if (step.level > answer.tree.level + 2) {
    const above = way.steps[way.lit - 2];
    await visit(above.level, above.node, 0, own);
  }
  const chip = document.querySelector(`#tree-way [data-node="${step.level}:${step.node}"]`);
  if (chip) chip.classList.add("lit");
  const last = way.lit === way.steps.length;
  if (last && answer.levels === step.level) await listLeaf(step, own);
  else list();
  await draw();
  if (!last) timer = setTimeout(() => light(own).catch((error) => toast(error.message)), matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : STEP);
}

// List the documents of the path's last node, next to the treemap or map.
async function listLeaf(step, own) {
  const offset = way.position === null ? 0 : Math.floor(way.position / MOST) * MOST;
  const leaf = await get("/api/tree", { level: step.level, node: step.node, depth: 0, most: MOST, offset });
  if (own === number) list(leaf);
}

async function visit(level, node, offset = 0, own = ++number) {
  $("picture-loading").hidden = picture === "map" || Boolean($("treemap").data);
  try {
    const found = await get("/api/tree", { level, node, depth: 2, most: MOST, offset });
    if (own !== number) return;
    answer = found;
    if (!level) found.tree.children.forEach((child, place) => hues.set(child.node, branchHue(place)));
    crumbs();
    list();
    if (picture === "treemap") await draw();
    else if (await loaded(own)) map.showNode([...answer.path, answer.tree]);
  } finally {
    if (own === number) $("picture-loading").hidden = true;
  }
}

function crumbs() {
  const parts = [...answer.path, answer.tree].flatMap((each, place, all) => {
    const name = each.level ? nameOf(each) : page.facts.name;
    const up = () => go(each.level ? { level: each.level, node: each.node } : {});
    const last = place === all.length - 1;
    const crumb = last ? el("span", { "aria-current": "page" }, name) : el("button", { class: "link", onclick: up }, name);
    return last ? [crumb] : [crumb, el("span", { class: "soft", "aria-hidden": "true" }, "›")];
  });
  fill($("crumbs"), parts, el("span", { class: "soft" }, plural(answer.tree.size, "document")));
}

const isLit = (level, node) => Boolean(way && way.steps.slice(0, way.lit).some((step) => step.level === level && step.node === node));

function list(found = answer) {
  const tree = found.tree;
  if (tree.level === found.levels) return listDocuments(found);
  const largest = tree.children.length ? tree.children[0].size : 1;
  const rows = tree.children.map((child) => el("li", { class: isLit(child.level, child.node) ? "lit" : null },
    el("button", { onclick: () => go({ level: child.level, node: child.node }) },
      el("span", {}, nameOf(child)), el("small", {}, count(child.size)), bar(child.size / largest))));
  const hidden = tree.child_count - tree.children.length;
  fill($("branch"), el("p", {}, plural(tree.child_count, "part"), hidden ? `, the largest ${tree.children.length} of them` : ""), el("ol", {}, rows));
  showLit();
}

function listDocuments(found) {
  const rows = found.documents.map((each) => rowOf(each, each.beginning, { onclick: () => page.open(each.id) }));
  const { level, node, size } = found.tree;
  const turn = (offset) => async () => list(await get("/api/tree", { level, node, depth: 0, most: MOST, offset }));
  const pager = size > MOST ? el("div", { class: "pager" },
    el("button", { disabled: found.offset === 0, onclick: turn(Math.max(0, found.offset - MOST)) }, "Previous"),
    el("span", { class: "soft" }, `${count(found.offset + 1)} – ${count(found.offset + found.documents.length)} of ${count(size)}`),
    el("button", { disabled: found.offset + MOST >= size, onclick: turn(found.offset + MOST) }, "Next")) : null;
  fill($("branch"), el("p", {}, `${plural(size, "document")} in `, el("b", {}, nameOf(found.tree))), el("ol", {}, rows), pager);
  showLit();
}

function rowOf(found, text, actions) {
  const title = titleOf(found);
  return el("li", { class: way && way.id === found.id ? "lit" : null }, el("button", actions,
    el("span", {}, found.rank ? el("b", { class: "ranked" }, String(found.rank)) : null, title || breakable(found.id)),
    el("small", {}, title ? breakable(found.id) : ""), el("span", { class: "beginning" }, text)));
}

function listHits(hits) {
  const rows = hits.map((hit) => rowOf(hit, hit.snippet,
    { onclick: () => page.open(hit.id, hit.passage), onmouseenter: () => map.point(hit.id), onmouseleave: () => map.point(null) }));
  fill($("branch"), el("p", {}, plural(hits.length, "hit"), " of the query, numbered as on the map"), el("ol", {}, rows));
}

function showLit() {
  const row = document.querySelector("#branch .lit");
  if (row) $("branch").scrollTop = Math.max(0, row.offsetTop - $("branch").clientHeight / 2);
}

// ------------------------------------------------------------------------------------------------- the picture

// A tile's id says what a click opens: a node, a document, or the rest of a node.
function tiles() {
  const drawn = { ids: [], names: [], labels: [], parents: [], values: [], colours: [], inks: [], text: [] };
  const add = (id, name, parent, value, tone, words = null) => {
    drawn.ids.push(id);
    drawn.names.push(plain(name));
    drawn.labels.push(plain(cut(name, 0.8 * side(value)))); // the heading of a tile that contains others, cut to its width
    drawn.text.push((words ? fitted(words, value) : [cut(name, side(value))]).map(plain).join("<br>"));
    drawn.parents.push(parent);
    drawn.values.push(value);
    drawn.colours.push(tone);
    drawn.inks.push(colour(tone === colour("accent") ? "on-accent" : "ink")); // plotly's own choice is hard to read on dark
  };
  const walk = (node, hue) => {
    const id = `${node.level}:${node.node}`;
    const own = node.level === 1 ? hues.get(node.node) : hue;
    const children = [...node.children, ...missing(node)];
    for (const child of children) {
      const inner = child.children.length > 0;
      add(`${child.level}:${child.node}`, nameOf(child), id, child.size, tone(child, child.level === 1 ? hues.get(child.node) : own),
        inner ? null : [...(child.name.length ? child.name : [nameOf(child)]), count(child.size)]);
      walk(child, own);
    }
    const shown = children.reduce((sum, child) => sum + child.size, 0);
    if (children.length && shown < node.size) {
      add(`rest:${id}`, `${count(node.child_count - children.length)} more`, id, node.size - shown, colour("line"));
    }
  };
  const tree = answer.tree;
  const id = `${tree.level}:${tree.node}`;
  const branch = answer.path.length > 1 ? answer.path[1].node : tree.level === 1 ? tree.node : null;
  const hue = hues.get(branch) ?? branchHue(0);
  const hint = answer.path.length ? "↑ up" : "click a part to go down";
  add(id, hint, "", tree.size, colour("card"));
  walk(tree, hue);
  for (const each of answer.documents) add(`document:${each.id}`, each.title || each.id, id, 1, tone({ level: tree.level + 2, id: each.id }, hue), lines(each.title || each.id));
  const others = tree.size - answer.documents.length;
  if (answer.documents.length && others) add(`rest:${id}`, `${count(others)} more`, id, others, colour("line"));
  return drawn;
}

// A node on the path is drawn even if it is not among the largest.
function missing(node) {
  if (!way || !node.children.length) return [];
  const isOnWay = !node.level || way.steps.some((step) => step.level === node.level && step.node === node.node);
  const next = way.steps.find((step) => step.level === node.level + 1);
  const isShown = !next || node.children.some((child) => child.node === next.node);
  return isOnWay && !isShown && next.size ? [{ ...next, children: [] }] : [];
}

// Tiles are nearly square, so their side follows from their share of the area, minus margins.
const side = (size) => 0.86 * Math.sqrt(($("treemap").clientWidth * $("treemap").clientHeight * size) / answer.tree.size) - 6;
const pen = document.createElement("canvas").getContext("2d");
const width = (text) => pen.measureText(text).width;

function cut(text, room) {
  pen.font = `${SIZE}px ${font().family}`;
  if (width(text) <= room) return text;
  let letters = text.length - 1;
  while (letters > 2 && width(`${text.slice(0, letters)}…`) > room) letters--;
  return letters > 2 ? `${text.slice(0, letters)}…` : "";
}

const fitted = (words, size) => words.slice(0, Math.floor(side(size) / LINE)).map((word) => cut(word, side(size))).filter(Boolean);

// Break a document's name into lines that fit into a tile.
function lines(name) {
  const found = [""];
  for (const part of name.split(/(?<=[\s./_])/)) {
    if (found.at(-1) && cut(found.at(-1) + part, side(1)) !== found.at(-1) + part) found.push("");
    found[found.length - 1] += part;
  }
  return found;
}

function tone(node, hue) {
  const deep = node.level - answer.tree.level > 1;
  if (node.id ? way && way.id === node.id : isLit(node.level, node.node)) return colour("accent");
  if (way && way.lit) return isDark() ? (deep ? "#20272c" : "#1b2126") : deep ? "#eef1f2" : "#e4e9ea"; // tiles off the path are gray
  if (isDark()) return `hsl(${hue} ${deep ? "30% 27%" : "32% 20%"})`;
  return `hsl(${hue} ${deep ? "52% 86%" : "42% 76%"})`;
}

async function draw() {
  const treemap = $("treemap");
  const Plotly = await plotly();
  const drawn = tiles();
  const trace = {
    type: "treemap", branchvalues: "total", ids: drawn.ids, labels: drawn.labels, parents: drawn.parents, values: drawn.values,
    text: drawn.text, textinfo: "text", hovertext: drawn.names, hovertemplate: "<b>%{hovertext}</b><br>documents: %{value:,}<extra></extra>", maxdepth: 3, sort: true,
    marker: { colors: drawn.colours, line: { width: 1, color: colour("card") }, pad: { t: 22, l: 4, r: 4, b: 4 }, cornerradius: 4 },
    pathbar: { visible: false }, tiling: { packing: "squarify", pad: 2 }, textfont: { family: font().family, size: SIZE, color: drawn.inks },
  };
  const layout = { ...frame(), margin: { t: 0, l: 0, r: 0, b: 0 }, uniformtext: { minsize: SIZE - 1, mode: "hide" } };
  await Plotly.react(treemap, [trace], layout, config);
  if (!treemap.dataset.listens) {
    treemap.dataset.listens = "yes";
    treemap.on("plotly_treemapclick", clicked);
  }
}

// Each node has its own address, so that the browser's "back" goes up again; plotly's own zoom is not used.
function clicked(event) {
  const id = event.points[0].id;
  if (id.startsWith("document:")) {
    page.open(id.slice("document:".length));
    return false;
  }
  const [level, node] = id.replace("rest:", "").split(":").map(Number);
  const isRoot = level === answer.tree.level;
  const above = answer.path.at(-1);
  if (!isRoot) go({ level, node });
  else if (!id.startsWith("rest:") && above) go(above.level ? { level: above.level, node: above.node } : {});
  return false;
}
