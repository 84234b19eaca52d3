// The path of a query or document down the tree, as a row of steps.

import { count, el, nameOf } from "./dom.js";

export function stepsOf(way, onStep) {
  return way.steps.flatMap((step) => {
    const title = `level ${step.level}: closest of ${count(step.siblings)}, cosine ${step.score.toFixed(3)}` +
      (step.rivals.length ? `; then ${step.rivals.map((each) => `${each.name.join(" · ") || each.node} ${each.score.toFixed(3)}`).join(", ")}` : "");
    const chip = el("button", { class: "step", title, "data-node": `${step.level}:${step.node}`, onclick: () => onStep(step) },
      nameOf(step), el("small", {}, step.score.toFixed(2)));
    return [el("span", { class: "arrow", "aria-hidden": "true" }, "→"), chip];
  });
}
