// The map: the tree's regions and a point for every document, on three stacked canvases.
// Points are written directly into the image's bytes: 200,000 of them take a few milliseconds.

import { get, getBytes } from "./api.js";
import { $, bar, el, fill, titleOf } from "./dom.js";
import { branchHue, colour, font, isDark } from "./plots.js";

const AGAIN = 700; // milliseconds between two requests for an unfinished map
const CLOSE = 9; // largest distance in pixels at which the pointer selects a point
const FEW = 3000; // up to this many visible points are drawn as circles
const TITLES = 30; // up to this many visible points get titles
const MOST_PIXELS = 4_000_000;
const LETTERS = [0, 14, 12, 11]; // size of a name's letters by level, in pixels

let page;
let go; // the tree view's function that opens a node
let asked = "";
let map = null; // what is drawn
let view = { scale: 1, x: 0, y: 0 }; // a place (u, v) of the unit square is drawn at (u·scale + x, v·scale + y), in CSS pixels
let size = { width: 0, height: 0, ratio: 1 };
let frame = 0;
let moving = 0; // the running animation
let shown = { query: null, hits: [], id: null }; // the query with its hits, or the document
let pointed = null; // the point, hit or region under the pointer
let names = []; // boxes of the names on the canvas
let look = {}; // the page's colors and fonts, read once per drawing
let picture = null; // the image data of the points
const known = new Map(); // documents by number

export function start(owner, goTo) {
  page = owner;
  go = goTo;
  new ResizeObserver(() => { if (map && !$("map").hidden) { const first = !size.width; measure(); if (first) fit([0, 0, 1, 1], false); draw(); } }).observe($("map"));
  listen($("map-marks"));
  $("map-in").addEventListener("click", () => closer(1.8));
  $("map-out").addEventListener("click", () => zoom(1 / 1.8));
  $("map-whole").addEventListener("click", () => fit([0, 0, 1, 1]));
}

// Load the map; return false if there is none, or if it is no longer wanted.
export async function load(isWanted) {
  const now = page.facts ? `${page.facts.index.documents} ${page.facts.index.changed}` : "";
  if (map && asked === now) return true;
  for (;;) {
    const answer = await get("/api/map");
    if (!isWanted()) return false;
    if (answer.readiness.state === "ready") {
      const bytes = await getBytes("/api/map/points");
      if (!isWanted()) return false;
      const first = !map;
      map = { ...pointsOf(bytes), ...regionsOf(answer) };
      for (let place = 0; place < map.count; place++) map.top[place] = map.ancestors[0][map.site[place]];
      asked = now;
      $("map").removeAttribute("aria-busy");
      announce(null);
      measure();
      if (first) fit([0, 0, 1, 1], false);
      return true;
    }
    if (answer.readiness.state === "off") { announce(`There is no map: ${answer.readiness.reason}.`); return false; }
    announce("Drawing the map", answer.readiness.share);
    await new Promise((resolve) => { setTimeout(resolve, AGAIN); });
    if (!isWanted()) return false;
  }
}

// Show a message instead of the map, or hide it.
function announce(message, share = null) {
  $("map-message").hidden = message === null;
  if (message !== null) fill($("map-message"), share === null ? null : el("span", { class: "spinner", "aria-hidden": "true" }), el("p", {}, message, share ? ` (${Math.round(100 * share)} %)` : ""), share === null ? null : bar(share));
}

// Zoom to the last node of a path from the root, or to the cell that contains it.
export function showNode(chain) {
  shown = { query: null, hits: [], id: null };
  const { level, node } = chain[Math.min(chain.length - 1, map.levels.length)];
  fit(level ? boxOf(level, node) : [0, 0, 1, 1]);
}

// Show a query and its hits, or a document.
export async function showFound(q, hits, id, isWanted) {
  const places = await get("/api/map/places", { ...(q ? { q } : {}), id: id ? [id] : hits.map((hit) => hit.id) });
  if (!isWanted()) return;
  const at = new Map(places.documents.map((place) => [place.id, place]));
  const found = (id ? [{ id, rank: 0, title: "" }] : hits).filter((hit) => at.has(hit.id)).map((hit) => ({ ...hit, ...at.get(hit.id) }));
  for (const hit of found) if (hit.rank) known.set(hit.number, { number: hit.number, id: hit.id, title: hit.title, beginning: hit.snippet || "" });
  shown = { query: places.query ? { x: places.query[0], y: places.query[1], text: q } : null, hits: found, id };
  fit(around([...found, ...(shown.query ? [shown.query] : [])]));
}

export function point(id) {
  const hit = shown.hits.find((each) => each.id === id);
  pointed = hit ? { hit } : null;
  draw();
}

export function redraw() {
  if (map && !$("map").hidden) { measure(); draw(); }
}

// ------------------------------------------------------------------------------------------------- what is drawn

function pointsOf(bytes) {
  const count = bytes.byteLength / 10;
  const steps = new Uint16Array(bytes, 4 * count, 2 * count);
  const [x, y] = [new Float32Array(count), new Float32Array(count)];
  for (let place = 0; place < count; place++) { x[place] = steps[2 * place] / 65535; y[place] = steps[2 * place + 1] / 65535; }
  return { count, number: new Uint32Array(bytes, 0, count), x, y, site: new Uint16Array(bytes, 8 * count, count), top: new Uint16Array(count), seen: new Uint32Array(count) };
}

// The cells as paths: one per branch of the tree, to fill, and one per level, for borders.
function regionsOf(answer) {
  const { levels, vertices, polygons } = answer;
  const last = levels.length;
  const ancestors = [polygons.map((_, site) => site)]; // of each cell, at the levels from the top
  for (let level = last - 1; level > 0; level--) ancestors.unshift(ancestors[0].map((node) => levels[level].parents[node]));
  const corner = (place) => [vertices[2 * place], vertices[2 * place + 1]];
  const land = levels[0].parents.map(() => new Path2D());
  const edges = new Map();
  const centres = polygons.map((corners, site) => {
    const path = land[ancestors[0][site]];
    corners.forEach((place, turn) => {
      if (turn) path.lineTo(...corner(place)); else path.moveTo(...corner(place));
      const next = corners[(turn + 1) % corners.length];
      const key = Math.min(place, next) * 1e6 + Math.max(place, next);
      edges.set(key, [...(edges.get(key) || []), site]);
    });
    path.closePath();
    return areaOf(corners.map(corner));
  });
  const borders = [new Path2D(), ...levels.map(() => new Path2D())]; // the coast, then those of each level
  for (const [key, [one, other]] of edges) {
    const kind = other === undefined ? 0 : 1 + ancestors.findIndex((of) => of[one] !== of[other]);
    borders[kind].moveTo(...corner(Math.floor(key / 1e6)));
    borders[kind].lineTo(...corner(key % 1e6));
  }
  return { levels, ancestors, land, borders, centres, corners: polygons.map((corners) => corners.map(corner)), labels: labelsOf(levels, ancestors, centres), hues: huesOf(levels[0]) };
}

// The area of a polygon and its center.
function areaOf(corners) {
  let [area, x, y] = [0, 0, 0];
  corners.forEach(([a, b], turn) => {
    const [c, d] = corners[(turn + 1) % corners.length];
    const cross = a * d - c * b;
    area += cross / 2;
    x += ((a + c) * cross) / 6;
    y += ((b + d) * cross) / 6;
  });
  return { area: Math.abs(area), x: x / area, y: y / area };
}

// A region's name is placed in the cell nearest to the region's center; the name may be as wide as the region.
function labelsOf(levels, ancestors, centres) {
  return levels.flatMap((of, above) => {
    const cells = of.parents.map(() => []);
    ancestors[above].forEach((node, site) => cells[node].push(site));
    return cells.map((sites, node) => {
      const area = sites.reduce((sum, site) => sum + centres[site].area, 0);
      const [x, y] = ["x", "y"].map((axis) => sites.reduce((sum, site) => sum + centres[site].area * centres[site][axis], 0) / area);
      const middle = sites.reduce((best, site) => (apart(centres[site], { x, y }) < apart(centres[best], { x, y }) ? site : best), sites[0]);
      const own = sites.length > 2 ? centres[middle] : { x, y };
      return { level: above + 1, node, words: of.names[node], size: of.sizes[node], x: own.x, y: own.y, radius: Math.sqrt(area / Math.PI) };
    }).filter((label) => label.words.length && label.size).sort((one, other) => other.size - one.size);
  });
}

const apart = (one, other) => (one.x - other.x) ** 2 + (one.y - other.y) ** 2;

// The color of each branch, as in the treemap: by size, the largest first.
function huesOf(level) {
  const order = level.sizes.map((_, node) => node).sort((one, other) => level.sizes[other] - level.sizes[one] || one - other);
  const hues = [];
  order.forEach((node, place) => { hues[node] = { hue: branchHue(place), shade: Math.floor(place / 12) % 3 }; });
  return hues;
}

// ------------------------------------------------------------------------------------------------- zoom and pan

function measure() {
  const [width, height] = [$("map").clientWidth, $("map").clientHeight];
  const ratio = Math.min(devicePixelRatio || 1, Math.sqrt(MOST_PIXELS / Math.max(1, width * height)));
  if (size.width === width && size.height === height && size.ratio === ratio) return;
  if (size.width) { view.x += (width - size.width) / 2; view.y += (height - size.height) / 2; }
  size = { width, height, ratio };
  for (const id of ["map-land", "map-points", "map-marks"]) { $(id).width = Math.round(width * ratio); $(id).height = Math.round(height * ratio); }
}

const least = () => 0.9 * Math.min(size.width, size.height);
const nearest = () => 4 + 2 * Math.sqrt(map.count); // largest zoom, relative to the full map

// Zoom to a box of the unit square.
function fit([left, top, right, bottom], isSlow = true) {
  const room = 0.86;
  const scale = Math.min(nearest() * least(), Math.max(least(), Math.min((room * size.width) / (right - left), (room * size.height) / (bottom - top))));
  const goal = { scale, x: size.width / 2 - (scale * (left + right)) / 2, y: size.height / 2 - (scale * (top + bottom)) / 2 };
  cancelAnimationFrame(moving);
  if (!isSlow || matchMedia("(prefers-reduced-motion: reduce)").matches) { view = goal; draw(); return; }
  const [from, began, time] = [view, performance.now(), 420];
  const step = (now) => {
    const t = Math.min(1, Math.max(0, (now - began) / time));
    const s = t * t * (3 - 2 * t);
    const mid = from.scale * (goal.scale / from.scale) ** s;
    // The center moves in step with the scale, so that it does not overshoot.
    const w = goal.scale === from.scale ? s : (mid - from.scale) / (goal.scale - from.scale);
    view = { scale: mid, x: from.x + (goal.x - from.x) * w, y: from.y + (goal.y - from.y) * w };
    draw();
    if (t < 1) moving = requestAnimationFrame(step);
  };
  moving = requestAnimationFrame(step);
}

function zoom(by, x = size.width / 2, y = size.height / 2) {
  cancelAnimationFrame(moving);
  const scale = Math.min(nearest() * least(), Math.max(0.6 * least(), view.scale * by));
  view = { scale, x: x - ((x - view.x) * scale) / view.scale, y: y - ((y - view.y) * scale) / view.scale };
  draw();
}

// Zoom in to the point nearest to the center, not to the center itself: it may lie between documents, and the canvas
// would soon be empty. The point keeps its position; if it was out of sight, it moves to the center.
function closer(by) {
  let [least, x, y] = [Infinity, size.width / 2, size.height / 2];
  for (let place = 0; place < map.count; place++) {
    const [u, v] = onPicture({ x: map.x[place], y: map.y[place] });
    const far = Math.hypot(u - size.width / 2, v - size.height / 2);
    if (far < least) [least, x, y] = [far, u, v];
  }
  const isSeen = x >= 0 && y >= 0 && x <= size.width && y <= size.height;
  if (!isSeen) pan(size.width / 2 - x, size.height / 2 - y);
  zoom(by, ...(isSeen ? [x, y] : []));
}

function pan(dx, dy) {
  cancelAnimationFrame(moving);
  const keep = (at, room) => Math.min(0.8 * room, Math.max(0.2 * room - view.scale, at));
  view = { ...view, x: keep(view.x + dx, size.width), y: keep(view.y + dy, size.height) };
  draw();
}

function boxOf(level, node) {
  const corners = map.corners.filter((_, site) => map.ancestors[level - 1][site] === node).flat();
  return corners.length ? around(corners.map(([x, y]) => ({ x, y })), 0) : [0, 0, 1, 1];
}

function around(places, margin = 0.02) {
  if (!places.length) return [0, 0, 1, 1];
  const [x, y] = [places.map((each) => each.x), places.map((each) => each.y)];
  return [Math.min(...x) - margin, Math.min(...y) - margin, Math.max(...x) + margin, Math.max(...y) + margin];
}

const onPicture = (place) => [place.x * view.scale + view.x, place.y * view.scale + view.y];

// ------------------------------------------------------------------------------------------------- the pictures

function draw() {
  if (frame || !map || $("map").hidden) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    const began = performance.now();
    look = { dark: isDark(), family: font().family };
    for (const name of ["ink", "card", "line", "accent", "on-accent", "down"]) look[name] = colour(name);
    drawLand();
    const visible = drawPoints();
    drawMarks(visible);
    $("map").dataset.milliseconds = (performance.now() - began).toFixed(2);
    $("map").dataset.view = [view.scale / least(), visible].map((each) => each.toFixed(2)).join(" ");
  });
}

function tone(node, part) {
  const { hue, shade } = map.hues[node];
  const { dark } = look;
  if (part === "land") return `hsl(${hue} ${dark ? 22 : 46}% ${(dark ? 20 : 90) + (dark ? 3 : -3) * shade}%)`;
  return `hsl(${hue} ${dark ? 46 : 48}% ${(dark ? 62 : 42) + (dark ? -6 : 6) * shade}%)`;
}

function drawLand() {
  const pen = $("map-land").getContext("2d");
  pen.setTransform(1, 0, 0, 1, 0, 0);
  pen.clearRect(0, 0, pen.canvas.width, pen.canvas.height);
  const scale = view.scale * size.ratio;
  pen.setTransform(scale, 0, 0, scale, view.x * size.ratio, view.y * size.ratio);
  map.land.forEach((path, node) => { pen.fillStyle = tone(node, "land"); pen.fill(path); });
  const cell = Math.sqrt(1 / map.corners.length) * view.scale; // width of a cell in pixels
  map.borders.forEach((path, kind) => {
    const isLast = kind === map.levels.length && kind > 1;
    if (isLast && cell < 22) return;
    pen.lineWidth = (kind === 0 ? 1 : kind === 1 ? 1.6 : 0.8) / view.scale;
    pen.strokeStyle = kind === 1 ? look.card : kind === 0 ? look.line : look.dark ? "rgb(255 255 255 / 13%)" : "rgb(255 255 255 / 75%)";
    pen.stroke(path);
  });
}

// Draw the points, and return how many are visible.
function drawPoints() {
  const pen = $("map-points").getContext("2d");
  const { width, height } = pen.canvas;
  const { x, y, top } = map;
  const [scale, dx, dy] = [view.scale * size.ratio, view.x * size.ratio, view.y * size.ratio];
  const { seen } = map;
  let visible = 0;
  for (let place = 0; place < map.count; place++) {
    const u = x[place] * scale + dx;
    const v = y[place] * scale + dy;
    if (u >= 0 && v >= 0 && u < width && v < height) seen[visible++] = place;
  }
  // The size at which evenly spread points would cover about 30 % of the land.
  const room = Math.min(width * height, scale * scale * 0.5);
  const radius = Math.min(5, Math.max(0.5, 0.3 * Math.sqrt(room / Math.max(1, visible)) / size.ratio)) * size.ratio;
  $("map-points").classList.toggle("behind", shown.hits.length > 0);
  if (visible <= FEW) { pen.clearRect(0, 0, width, height); drawRound(pen, seen, visible, radius, scale, dx, dy); return visible; }
  const tones = map.hues.map((_, node) => bytesOf(tone(node, "point")));
  if (!picture || picture.width !== width || picture.height !== height) picture = new ImageData(width, height);
  const pixels = new Uint32Array(picture.data.buffer);
  pixels.fill(0);
  const side = Math.max(1, Math.round(1.8 * radius));
  const back = side >> 1;
  for (let place = 0; place < visible; place++) {
    const each = seen[place];
    const left = Math.max(0, (x[each] * scale + dx - back) | 0);
    const first = Math.max(0, (y[each] * scale + dy - back) | 0);
    const right = Math.min(width, left + side);
    const end = Math.min(height, first + side);
    const ink = tones[top[each]];
    for (let row = first; row < end; row++) for (let at = row * width + left; at < row * width + right; at++) pixels[at] = ink;
  }
  pen.putImageData(picture, 0, 0);
  return visible;
}

function drawRound(pen, seen, visible, radius, scale, dx, dy) {
  const paths = map.hues.map(() => null);
  for (let place = 0; place < visible; place++) {
    const each = seen[place];
    const path = (paths[map.top[each]] ??= new Path2D());
    const [u, v] = [map.x[each] * scale + dx, map.y[each] * scale + dy];
    path.moveTo(u + radius, v);
    path.arc(u, v, radius, 0, 2 * Math.PI);
  }
  paths.forEach((path, node) => { if (path) { pen.fillStyle = tone(node, "point"); pen.fill(path); } });
}

// A color as a number for image data.
const inks = new Map();
function bytesOf(text) {
  if (!inks.has(text)) {
    const pen = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    inks.set(text, new Uint32Array(pen.getImageData(0, 0, 1, 1).data.buffer)[0]);
  }
  return inks.get(text);
}

function drawMarks(visible) {
  const pen = $("map-marks").getContext("2d");
  pen.setTransform(size.ratio, 0, 0, size.ratio, 0, 0);
  pen.clearRect(0, 0, size.width, size.height);
  pen.lineJoin = "round";
  names = [];
  const taken = [];
  drawHits(pen, taken);
  drawNames(pen, taken);
  if (visible <= TITLES) drawTitles(pen, taken);
  if (pointed && pointed.place !== undefined) ring(pen, onPicture({ x: map.x[pointed.place], y: map.y[pointed.place] }), 7);
  else if (pointed && pointed.hit) ring(pen, onPicture(pointed.hit), 12);
}

function ring(pen, [x, y], radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.lineWidth = 2;
  pen.strokeStyle = look.ink;
  pen.stroke();
}

function drawHits(pen, taken) {
  const from = shown.query && onPicture(shown.query);
  pen.strokeStyle = look.accent;
  pen.lineWidth = 1;
  pen.globalAlpha = 0.45;
  if (from) for (const hit of shown.hits) { pen.beginPath(); pen.moveTo(...from); pen.lineTo(...onPicture(hit)); pen.stroke(); }
  pen.globalAlpha = 1;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const hit of [...shown.hits].reverse()) {
    const [x, y] = onPicture(hit);
    pen.beginPath();
    pen.arc(x, y, 9, 0, 2 * Math.PI);
    pen.fillStyle = look.accent;
    pen.fill();
    pen.lineWidth = 1.5;
    pen.strokeStyle = look.card;
    pen.stroke();
    pen.fillStyle = look["on-accent"];
    pen.font = `600 11px ${look.family}`;
    if (hit.rank) pen.fillText(String(hit.rank), x, y + 0.5);
    taken.push([x - 10, y - 10, x + 10, y + 10]);
  }
  if (!from) return;
  const [x, y] = from;
  pen.beginPath();
  for (let turn = 0; turn < 10; turn++) {
    const [angle, far] = [(turn * Math.PI) / 5 - Math.PI / 2, turn % 2 ? 5 : 11];
    pen.lineTo(x + far * Math.cos(angle), y + far * Math.sin(angle));
  }
  pen.closePath();
  pen.lineWidth = 2;
  pen.strokeStyle = look.card;
  pen.stroke();
  pen.fillStyle = look.down;
  pen.fill();
  taken.push([x - 11, y - 11, x + 11, y + 11]);
  write(pen, ["query"], x, y + 22, 11, true, taken);
}

// Write names from the top level down while there is room; skip a region that fills the canvas.
function drawNames(pen, taken) {
  const most = Math.max(size.width, size.height);
  for (const label of map.labels) {
    const room = 2 * label.radius * view.scale;
    if (label.level > 1 && room < 62) continue;
    if (room > 2.2 * most) continue;
    const [x, y] = onPicture(label);
    if (x < -40 || y < -20 || x > size.width + 40 || y > size.height + 20) continue;
    const letters = LETTERS[Math.min(label.level, LETTERS.length - 1)];
    const lines = room < 90 ? label.words.slice(0, 2) : label.words;
    const box = write(pen, lines, x, y, letters, label.level === 1, taken);
    if (box) names.push({ box, label });
  }
}

// Write lines around a point if no other text is there; return their box.
function write(pen, lines, x, y, letters, isStrong, taken) {
  pen.font = `${isStrong ? 650 : 500} ${letters}px ${look.family}`;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  const wide = Math.max(...lines.map((line) => pen.measureText(line).width));
  const tall = letters * 1.16 * lines.length;
  const box = [x - wide / 2 - 3, y - tall / 2 - 2, x + wide / 2 + 3, y + tall / 2 + 2];
  if (taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) return null;
  taken.push(box);
  lines.forEach((line, place) => {
    const at = y + (place - (lines.length - 1) / 2) * letters * 1.16;
    pen.lineWidth = 3.5;
    pen.strokeStyle = look.dark ? "rgb(17 20 23 / 80%)" : "rgb(255 255 255 / 85%)";
    pen.strokeText(line, x, at);
    pen.fillStyle = look.ink;
    pen.fillText(line, x, at);
  });
  return box;
}

let naming;
function drawTitles(pen, taken) {
  const missing = [];
  for (let place = 0; place < map.count; place++) {
    const [x, y] = onPicture({ x: map.x[place], y: map.y[place] });
    if (x < 0 || y < 0 || x > size.width || y > size.height) continue;
    const found = known.get(map.number[place]);
    if (found) write(pen, [short(found.title || found.id, 40)], x, y + 14, 11, false, taken);
    else missing.push(map.number[place]);
  }
  clearTimeout(naming);
  if (missing.length) naming = setTimeout(() => learn(missing.slice(0, TITLES)).then(draw, () => {}), 150);
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

async function learn(numbers) {
  const wanted = numbers.filter((number) => !known.has(number));
  if (wanted.length) for (const each of await get("/api/map/documents", { number: wanted })) known.set(each.number, each);
}

// ------------------------------------------------------------------------------------------------- pointer and keys

function listen(canvas) {
  const fingers = new Map();
  let dragged = 0;
  const at = (event) => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  canvas.addEventListener("wheel", (event) => { event.preventDefault(); zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), ...at(event)); }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); fingers.set(event.pointerId, at(event)); dragged = fingers.size > 1 ? 99 : 0; });
  canvas.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) { if (event.pointerType === "mouse") hover(...at(event)); return; }
    const now = at(event);
    const other = [...fingers].find(([id]) => id !== event.pointerId);
    fingers.set(event.pointerId, now);
    dragged += Math.hypot(now[0] - before[0], now[1] - before[1]);
    if (other) {
      const [to] = [other[1]];
      zoom(Math.hypot(now[0] - to[0], now[1] - to[1]) / Math.max(1, Math.hypot(before[0] - to[0], before[1] - to[1])), (now[0] + to[0]) / 2, (now[1] + to[1]) / 2);
      pan((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
    } else if (dragged > 3) { hide(); pan(now[0] - before[0], now[1] - before[1]); }
  });
  const end = (event) => {
    const was = fingers.delete(event.pointerId);
    if (was && event.type === "pointerup" && dragged <= 3) choose(...at(event));
  };
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, end);
  canvas.addEventListener("pointerleave", hide);
  canvas.addEventListener("dblclick", (event) => zoom(2, ...at(event)));
  canvas.addEventListener("keydown", (event) => {
    const steps = { "+": () => closer(1.5), "=": () => closer(1.5), "-": () => zoom(1 / 1.5), 0: () => fit([0, 0, 1, 1]), ArrowLeft: () => pan(80, 0), ArrowRight: () => pan(-80, 0), ArrowUp: () => pan(0, 80), ArrowDown: () => pan(0, -80) };
    if (steps[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); steps[event.key](); }
  });
}

// What is at a position: a hit, a point, a name, or at least a cell.
function under(x, y) {
  const hit = shown.hits.find((each) => Math.hypot(...onPicture(each).map((value, axis) => value - [x, y][axis])) < 11);
  if (hit) return { hit };
  const [u, v, reach] = [(x - view.x) / view.scale, (y - view.y) / view.scale, CLOSE / view.scale];
  let [best, place] = [reach * reach, -1];
  for (let each = 0; each < map.count; each++) {
    const far = (map.x[each] - u) ** 2 + (map.y[each] - v) ** 2;
    if (far < best) { best = far; place = each; }
  }
  const name = names.find(({ box }) => x >= box[0] && x <= box[2] && y >= box[1] && y <= box[3]);
  const site = cellAt(u, v);
  if (name && (place < 0 || name.label.level === 1)) return { label: name.label, site };
  return place < 0 ? { site } : { place, site: map.site[place] };
}

// A point is in a cell if it is on the same side of all its edges.
function cellAt(u, v) {
  return map.corners.findIndex((corners) => {
    let sides = 0;
    corners.forEach(([a, b], turn) => { const [c, d] = corners[(turn + 1) % corners.length]; sides += Math.sign((c - a) * (v - b) - (d - b) * (u - a)); });
    return Math.abs(sides) === corners.length;
  });
}

let reading;
function hover(x, y) {
  if (!map) return;
  const found = under(x, y);
  const before = pointed;
  pointed = found.hit || found.place !== undefined || found.label ? found : null;
  $("map-marks").style.cursor = pointed ? "pointer" : "grab";
  clearTimeout(reading);
  if (found.hit) showTip(x, y, titleOf(found.hit) || found.hit.id, regionOf(cellAt(found.hit.x, found.hit.y)));
  else if (found.place !== undefined) {
    const number = map.number[found.place];
    const titled = () => { const each = known.get(number); showTip(x, y, titleOf(each) || short(each.beginning, 70) || each.id, regionOf(found.site)); };
    if (known.has(number)) titled();
    else reading = setTimeout(() => learn([number]).then(() => { if (pointed === found && known.has(number)) titled(); }, () => {}), 40);
  } else if (found.site >= 0) showTip(x, y, null, regionOf(found.site));
  else hide();
  if (before !== pointed) draw();
}

// The names of the regions that a cell is in, from the top.
function regionOf(site) {
  if (site < 0) return "";
  return map.levels.map((level, above) => level.names[map.ancestors[above][site]].join(" · ")).filter(Boolean).join(" › ");
}

function showTip(x, y, title, region) {
  const tip = $("map-tip");
  fill(tip, title ? el("b", {}, short(title, 160)) : null, region ? el("span", {}, region) : null);
  tip.hidden = false;
  const [wide, tall] = [tip.offsetWidth, tip.offsetHeight];
  tip.style.left = `${Math.max(4, Math.min(size.width - wide - 4, x + 14))}px`;
  tip.style.top = `${y + 18 + tall > size.height ? y - tall - 12 : y + 18}px`;
}

function hide() {
  clearTimeout(reading);
  $("map-tip").hidden = true;
  if (pointed) { pointed = null; draw(); }
}

async function choose(x, y) {
  if (!map) return;
  const found = under(x, y);
  if (found.hit) page.open(found.hit.id);
  else if (found.label) go({ level: found.label.level, node: found.label.node });
  else if (found.place !== undefined) {
    const number = map.number[found.place];
    await learn([number]);
    if (known.has(number)) page.open(known.get(number).id);
  }
}
