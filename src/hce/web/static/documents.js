// The dialogs: a document in full, with its path in the tree and its removal, and a form for a new one.

import { get, post, remove, token } from "./api.js";
import { $, el, fill, filledIn, marked, plural, titleOf, toast, valueOf } from "./dom.js";
import { stepsOf } from "./way.js";

const address = (id) => `/api/documents/${encodeURIComponent(id)}`;

// Open a document; the best passage of a long one is marked and scrolled to.
export async function openDocument(page, id, passage = null) {
  const dialog = $("document");
  let found;
  try {
    found = await get(address(id));
  } catch (error) {
    return toast(error.message);
  }
  const close = () => dialog.close();
  const inFull = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const rows = filledIn(found.metadata).map(([name, value]) => el("tr", {}, el("td", {}, name), el("td", {}, valueOf(value, inFull))));
  const way = el("div", { class: "way", hidden: true });
  const inTree = () => { close(); page.go("tree", { id }); };
  fill(dialog, el("div", { class: "sheet" },
    el("header", {}, el("h2", { id: "document-title" }, found.title || found.id), el("button", { "aria-label": "Close", onclick: close }, "Close")),
    el("div", { tabindex: "0" },
      titleOf(found) ? el("p", { class: "soft mono" }, found.id) : null,
      el("p", { class: "text" }, marked(found.text, passage ? [passage] : [])),
      rows.length ? el("table", {}, el("tbody", {}, rows)) : null,
      way),
    el("footer", {},
      page.facts.index.tree_levels ? el("button", { onclick: inTree }, "Show in the tree") : null,
      el("span", { class: "grow" }),
      page.facts.writable ? removal(page, found.id, close) : null)));
  dialog.showModal();
  dialog.querySelector(".text mark")?.scrollIntoView({ block: "center" });
  if (page.facts.index.tree_levels) showPlace(way, id, inTree);
}

async function showPlace(way, id, inTree) {
  const answer = await get("/api/tree/path", { id }).catch(() => null);
  if (!answer) return;
  fill(way, el("span", {}, answer.way.came_later ? "added after the tree was grown; position" : "position in the tree"), stepsOf(answer.way, inTree));
  way.hidden = false;
}

// Ask for a second click, against accidental removal.
function removal(page, id, close) {
  const problem = el("span", { class: "problem" });
  const button = el("button", { class: "danger" }, "Remove");
  let sure = false;
  button.addEventListener("click", async () => {
    if (!sure) {
      sure = true;
      button.textContent = "Really remove it?";
      return;
    }
    if (!(await hasToken(page))) return;
    try {
      const answer = await remove(address(id));
      close();
      await page.changed(`Removed; ${plural(answer.documents, "document")} left`);
    } catch (error) {
      if (error.status === 401) token.set("");
      problem.textContent = error.message;
    }
  });
  return [problem, button];
}

async function hasToken(page) {
  if (!page.facts.needs_token || token.get()) return true;
  const given = window.prompt("Writing needs the token of this server:");
  if (given) token.set(given.trim());
  return Boolean(given);
}

export function openAdding(page) {
  const dialog = $("adding");
  const close = () => dialog.close();
  const problem = el("p", { class: "problem", role: "alert" });
  const field = (name, attributes = {}) => el("input", { name, autocomplete: "off", ...attributes });
  const fields = {
    id: field("id", { required: true, maxlength: 512 }),
    title: field("title", { maxlength: 10000 }),
    text: el("textarea", { name: "text", maxlength: 1000000 }),
    metadata: field("metadata", { placeholder: JSON.stringify(Object.fromEntries(page.fields.slice(0, 3).map((each) => [each.name, each.example]))), class: "mono" }),
    update: el("input", { name: "update", type: "checkbox" }),
    token: field("token", { type: "password", value: token.get() }),
  };
  const save = el("button", { class: "strong", type: "submit" }, "Add");
  const form = el("form", { class: "sheet", onsubmit: (event) => { event.preventDefault(); submit(page, fields, problem, save, close); } },
    el("header", {}, el("h2", {}, "Add a document"), el("button", { type: "button", onclick: close }, "Close")),
    el("div", { class: "form" },
      el("label", {}, "Id", fields.id),
      el("label", {}, "Title", fields.title),
      el("label", {}, "Text", fields.text),
      el("label", {}, "Metadata, as JSON (optional)", fields.metadata),
      el("label", { class: "check" }, fields.update, "replace a document with the same id"),
      page.facts.needs_token ? el("label", {}, "Token", fields.token) : null,
      problem),
    el("footer", {}, el("span", { class: "soft" }, "Searches find it at once, without training."), el("span", { class: "grow" }), save));
  fill(dialog, form);
  dialog.showModal();
  fields.id.focus();
}

async function submit(page, fields, problem, save, close) {
  problem.textContent = "";
  let metadata = {};
  try {
    metadata = JSON.parse(fields.metadata.value.trim() || "{}");
    if (metadata === null || typeof metadata !== "object" || Array.isArray(metadata)) throw new SyntaxError();
  } catch {
    problem.textContent = 'Metadata: write a JSON object, such as {"year": 2024}.';
    return;
  }
  if (page.facts.needs_token) token.set(fields.token.value.trim());
  save.disabled = true;
  try {
    const document = { id: fields.id.value.trim(), title: fields.title.value, text: fields.text.value, metadata };
    const answer = await post("/api/documents", { documents: [document], update: fields.update.checked });
    close();
    await page.changed(`Added; ${plural(answer.documents, "document")} now`);
  } catch (error) {
    problem.textContent = error.message;
  } finally {
    save.disabled = false;
  }
}
