// Status: the contents of the index, the drift verdict, and the training.

import { $, count, el, fill, nameOf, plural } from "./dom.js";
import { colour, config, font, frame, onTheme, plain, plotly } from "./plots.js";

const ADVICE = {
  "re-cluster": "Run hce rebuild: it grows the tree again, without training.",
  retrain: "Run hce train on the current documents, then hce reindex with the new model.",
};

let page;
let timer;

export function start(owner) {
  page = owner;
  onTheme(() => { if (!$("status").hidden && page.facts) draw(page.facts.training); });
}

export async function show() {
  clearTimeout(timer);
  const facts = await page.refresh({ drift: true });
  const { index, training } = facts;
  fill($("status"),
    el("div", { class: "cards" },
      card("Documents", count(index.documents), `${count(index.added)} added and ${count(index.removed)} removed since it was made`),
      card("Encoder", index.encoder, `${index.dim} dimensions${index.base_encoder ? `, trained from ${index.base_encoder}` : ", not trained"}`),
      card("Engine", index.engine, index.pending ? `${count(index.pending)} changes since its snapshot` : ""),
      card("Tree", index.tree_levels ? plural(index.tree_levels, "level") : "none",
        index.tree_levels ? `${facts.tree_nodes.map(count).join(" → ")} nodes above the documents` : ""),
      card("On disk", size(index.bytes), day(index.created) === day(index.changed) ? `made ${day(index.created)}` : `made ${day(index.created)}, changed ${day(index.changed)}`),
      driftCard(facts.drift),
      index.search ? searchCard(index.search) : null,
      grownCard(facts.drift.grown)),
    training ? trainingOf(training, index) : notTrained(index));
  if (training) await draw(training);
  if (facts.drift.state === "measuring" || facts.untrained.state === "preparing") {
    timer = setTimeout(() => { if (!$("status").hidden) show(); }, 1500);
  }
}

function card(title, figure, note) {
  return el("div", { class: "card" }, el("h3", {}, title), el("div", { class: "figure" }, figure), note ? el("p", {}, note) : null);
}

// The quality of the search, and how it was measured.
function searchCard(search) {
  const [, figure, parts, how] = search.match(/^(nDCG.*?) \((.*)\) (by .*)$/) ?? [];
  return el("div", { class: "card wide" }, el("h3", {}, "Search"), figure ? el("div", { class: "figure" }, figure) : null,
    el("p", {}, sentence(figure ? `${parts}; measured ${how}` : search)));
}

function driftCard(drift) {
  const first = drift.state === "measuring" && !drift.reasons.length;
  const verdict = el("span", { class: `verdict ${drift.verdict}` }, first ? "measuring …" : drift.verdict);
  const reasons = drift.reasons.map((reason) => el("p", {}, sentence(reason)));
  const advice = ADVICE[drift.verdict] ? el("p", {}, ADVICE[drift.verdict]) : null;
  return el("div", { class: "card" }, el("h3", {}, "Time to retrain?"), verdict, reasons, advice);
}

// The regions of the tree that grew, with the new words of their later documents.
function grownCard(grown) {
  if (!grown.length) return null;
  const items = grown.map((region) => {
    const look = () => page.go("tree", { level: region.level, node: region.node });
    return el("li", {}, el("button", { class: "link", onclick: look }, nameOf(region)),
      `${plural(region.before, "document")} and ${count(region.added)} later ones`,
      ...(region.words.length ? [" · new words: ", el("b", {}, region.words.join(", "))] : []));
  });
  return el("div", { class: "card wide grown" }, el("h3", {}, "Regions of the tree that grew"), el("ul", {}, items));
}

const sentence = (text) => `${text.charAt(0).toUpperCase()}${text.slice(1)}${text.endsWith(".") ? "" : "."}`;
const size = (bytes) => (bytes < 1e9 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e9).toFixed(2)} GB`);
const day = (text) => new Date(text).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

function notTrained(index) {
  return [el("h2", { class: "section-title" }, "Training"),
    el("p", { class: "soft" }, "The encoder of this index, ", el("b", {}, index.encoder), ", was not trained with ", el("code", {}, "hce train"),
      ". After training, this page shows the gain.")];
}

function trainingOf(training, index) {
  const kinds = Object.keys(training.after);
  const mean = (values) => kinds.reduce((sum, kind) => sum + (values[kind] ?? 0), 0) / kinds.length;
  const row = (name, before, after) => el("tr", {}, el("td", {}, name), el("td", {}, before.toFixed(3)), el("td", {}, after.toFixed(3)),
    el("td", { class: after >= before ? "up" : "down" }, `${after >= before ? "+" : "−"}${Math.abs(after - before).toFixed(3)}`));
  const rows = kinds.filter((kind) => kind in training.before).map((kind) => row(kind, training.before[kind], training.after[kind]));
  if (rows.length > 1) rows.push(row("mean", mean(training.before), mean(training.after)));
  const mix = training.mix === 1 ? "" : training.mix === 0 ? " Training did not help, so the model keeps the weights from before."
    : ` The weights are ${Math.round(100 * training.mix)} % of the way from the untrained to the trained ones.`;
  const plot = (id, title) => el("div", { class: "card" }, el("h3", {}, title), el("div", { id, class: "plot" }));
  return [
    el("h2", { class: "section-title" }, "Training"),
    el("p", { class: "soft" }, `Measured by ${training.metric}.${mix}`),
    el("div", { class: "plots" },
      el("div", { class: "card" }, el("h3", {}, "Before and after"),
        el("table", { class: "measures" }, el("thead", {}, el("tr", {}, ["", index.base_encoder || "before", "trained", ""].map((text) => el("th", {}, text)))), el("tbody", {}, rows))),
      plot("plot-dev", "Dev measure by epoch"),
      plot("plot-loss", "Loss by level"),
      plot("plot-accuracy", "Queries routed to the right node, by level")),
  ];
}

async function draw(training) {
  if (!training || !$("plot-dev")) return;
  const Plotly = await plotly();
  const { epochs } = training;
  const kinds = Object.keys(epochs[0].dev);
  const dev = kinds.map((kind) => line(kind, epochs, (epoch) => epoch.dev[kind]));
  if (kinds.length > 1) dev.push({ ...line("mean", epochs, (epoch) => epoch.metric), line: { width: 3, color: colour("ink") } });
  const trained = epochs.filter((epoch) => epoch.epoch);
  const losses = [...new Set(trained.flatMap((epoch) => Object.keys(epoch.loss)))];
  const levels = Math.max(0, ...trained.map((epoch) => epoch.accuracy.length));
  const drawn = [
    ["plot-dev", dev, null],
    ["plot-loss", losses.map((name) => line(name.replace("_", " "), trained, (epoch) => epoch.loss[name])), null],
    ["plot-accuracy", Array.from({ length: levels }, (_, level) => line(`level ${level + 1}`, trained, (epoch) => epoch.accuracy[level])), ".0%"],
  ];
  for (const [id, traces, format] of drawn) {
    if ($(id)) await Plotly.react($(id), traces, layout(format), config);
  }
}

function line(name, epochs, value) {
  return { type: "scatter", mode: "lines+markers", name: plain(name), x: epochs.map((epoch) => epoch.epoch), y: epochs.map(value),
    line: { width: 1.8 }, marker: { size: 5 }, hovertemplate: `${plain(name)}, epoch %{x}: %{y:.4f}<extra></extra>` };
}

function layout(format) {
  const axis = { gridcolor: colour("line"), zeroline: false, automargin: true };
  return { ...frame(), margin: { t: 8, l: 36, r: 8, b: 30 }, plot_bgcolor: "rgba(0,0,0,0)", font: { ...font(), color: colour("soft") },
    xaxis: { ...axis, dtick: 1, title: { text: "epoch", standoff: 4 }, showgrid: false }, yaxis: { ...axis, tickformat: format ?? undefined },
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, colorway: ["#0f9488", "#6366f1", "#d97706", "#db2777", "#64748b", "#65a30d"] };
}
