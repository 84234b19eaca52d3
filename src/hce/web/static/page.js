// The page: switches views and handles keys. Each view has its own module.

import { get } from "./api.js";
import { $, plural, toast } from "./dom.js";
import { exampleOf } from "./facets.js";
import { openAdding, openDocument } from "./documents.js";
import * as search from "./search.js";
import * as status from "./status.js";
import * as tree from "./tree.js";

const views = { search, tree, status };

const page = {
  facts: null,
  fields: [], // of the metadata
  go(view, parameters = {}) {
    const query = new URLSearchParams(parameters).toString();
    location.hash = query ? `${view}?${query}` : view;
  },
  open: (id, passage) => openDocument(page, id, passage),
  async refresh(parameters = {}) {
    [page.facts, { fields: page.fields }] = await Promise.all([get("/api/status", parameters), get("/api/fields")]);
    $("where").placeholder = exampleOf(page.fields);
    $("where").parentElement.hidden = !page.fields.length && !$("where").value; // no fields to filter by
    $("name").textContent = page.facts.name;
    $("count").textContent = plural(page.facts.index.documents, "document");
    $("add").hidden = !page.facts.writable;
    document.title = `${page.facts.name} · hce`;
    return page.facts;
  },
  // After a write, fetch the current view again.
  async changed(message) {
    toast(message);
    await page.refresh();
    show();
  },
};

function place() {
  const [view, query = ""] = location.hash.slice(1).split("?");
  return { view: views[view] ? view : "search", parameters: new URLSearchParams(query) };
}

function show() {
  const { view, parameters } = place();
  for (const name of Object.keys(views)) {
    $(name).hidden = name !== view;
    const link = document.querySelector(`nav [data-view=${name}]`);
    if (name === view) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  Promise.resolve(views[view].show(parameters)).catch((error) => toast(error.message));
}

function isTyping(target) {
  return target.matches("input:not([type=checkbox]), textarea, select");
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "/" && !isTyping(event.target)) {
    event.preventDefault();
    if (place().view !== "tree") page.go("search", place().view === "search" ? place().parameters : {});
    const box = place().view === "tree" ? $("tree-q") : $("q");
    setTimeout(() => (box.focus(), box.select()));
  } else if (place().view === "search") {
    search.key(event);
  }
});

async function start() {
  for (const view of Object.values(views)) view.start(page);
  $("add").addEventListener("click", () => openAdding(page));
  window.addEventListener("hashchange", show);
  try {
    await page.refresh();
  } catch (error) {
    toast(error.message);
  }
  show();
}

start();
