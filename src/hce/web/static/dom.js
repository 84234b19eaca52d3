// Make elements. Texts of documents become text nodes here, never HTML.

export const $ = (id) => document.getElementById(id);

const present = (children) => children.flat().filter((child) => child !== null && child !== undefined && child !== false);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...present(children));
  return node;
}

// Marks count code points, as Python does; JavaScript's strings count UTF-16 units.
export function marked(text, marks) {
  const points = Array.from(text);
  const parts = [];
  let done = 0;
  for (const [start, end] of marks) {
    parts.push(points.slice(done, start).join(""), el("mark", {}, points.slice(start, end).join("")));
    done = end;
  }
  parts.push(points.slice(done).join(""));
  return parts;
}

// Long dotted names may break after a dot, a slash or an underscore.
export function breakable(text) {
  return text.split(/(?<=[./_])/).flatMap((part, place) => (place ? [el("wbr"), part] : [part]));
}

export function spelled(value) {
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}

// A title that repeats the id is not shown.
export const titleOf = (found) => (found.title === found.id ? "" : found.title);

// The fields of metadata that have a value.
export const filledIn = (metadata) => Object.entries(metadata).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value.length));

// A value of metadata: a URL as a link without a referrer, a list without JSON's brackets.
export function valueOf(value, shown = spelled) {
  if (Array.isArray(value) && value.every((each) => typeof each !== "object")) return shown(value.join(", "));
  if (typeof value !== "string" || !/^https?:\/\/[^\s<>"]+$/i.test(value) || !URL.canParse(value)) return shown(value);
  return el("a", { href: value, target: "_blank", rel: "noopener noreferrer" }, shown(value));
}

export const count = (number) => number.toLocaleString("en");
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const nameOf = (node) => (node.name.length ? node.name.join(" · ") : node.level === 0 ? "all documents" : `node ${node.node}`);

export function bar(share) {
  const inner = el("i");
  inner.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  return el("span", { class: "bar", "aria-hidden": "true" }, inner);
}

export const treeIcon = () => $("tree-icon").content.cloneNode(true);

let hiding;
export function toast(message) {
  clearTimeout(hiding);
  $("toast").textContent = message;
  $("toast").classList.add("on");
  hiding = setTimeout(() => $("toast").classList.remove("on"), 4000);
}
