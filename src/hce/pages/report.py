"""A report on a trained model: what training brought, query by query, and how it went, as one HTML file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from shlex import quote
from typing import Any

import numpy as np

from hce.data.records import USUAL, Reading
from hce.evaluation.significance import compare_several
from hce.files import checked_fields
from hce.pages.page import Branch, Panel, definitions, difference_bars, html_page, html_table, line_panels, tree_list
from hce.search.shares import Calibration
from hce.training.model_folder import (
    CorpusFacts,
    DevQuery,
    Epoch,
    ModelFolder,
    gains,
    mean_over_kinds,
    what_was_learned,
)
from hce.training.recipe import Recipe, shown_value
from hce.tree.hierarchy import Hierarchy

MOST_CHANGED = 15  # queries shown of those that gained most, and of those that lost most
MOST_CHILDREN = 12  # of a node in the picture of the tree
DRAWN_LEVELS = 2  # of the tree, below the root


def report(model: ModelFolder) -> str:
    """Write the page."""
    facts = model.facts
    parts = [
        definitions(_about(model)),
        "<h2>Before and after</h2>",
        f"<p>{escape(facts.metric)}: <strong>{gains(facts.before, facts.stages, facts.after)}</strong>.</p>",
        "<p>p: could the difference be chance? (paired randomization test over queries, Holm’s correction)</p>",
        _before_and_after(model),
        *_search(facts.calibration),
        *_tree_at_work(facts.recipe),
        *_changes(model.queries),
    ]
    if model.history:
        epochs = [epoch.epoch for epoch in model.history]
        parts += ["<h2>How training went</h2>", line_panels(epochs, training_panels(model.history))]
    if model.tree is not None and model.tree.levels:
        parts += ["<h2>The tree of the corpus</h2>", tree_list(branches(model.tree))]
    parts += ["<h2>To repeat it</h2>", f"<pre>{escape(command(model))}</pre>"]
    return html_page(f"{model.path.name}: {facts.encoder} on {facts.corpus['name']}", parts)


def _tree_at_work(recipe: Mapping[str, Any]) -> list[str]:
    """Say how to measure what the tree brought: it works inside of training, so it is no step of its own."""
    if not recipe["tree"]:
        return []
    return [
        "<p>The tree gives training its wrong answers, so its part is within the figures above. "
        "<code>hce compare DATA --systems hce-hybrid,no-tree-hybrid</code> trains with and without it.</p>"
    ]


def command(model: ModelFolder) -> str:
    """Return the command that makes this model again, next to it: whatever is not a default is spelled out."""
    facts = model.facts
    defaults = Recipe.for_encoder(static=facts.static, train=facts.recipe.get("train", "encoder")).as_dict()
    defaults["train"] = "both" if facts.static else "companion"
    corpus = checked_fields(CorpusFacts, facts.corpus)
    words = ["hce", "train", corpus.source or corpus.name, "-o", f"{model.path.name}-again"]
    words += ["--encoder", facts.base_encoder, *_reading_options(Reading(**(corpus.reading or {})))]
    if facts.label_files:
        words += ["--labels", ",".join(f"{what}={path}" for what, path in facts.label_files.items())]
    for name, value in facts.recipe.items():
        if value != defaults.get(name):
            words += ["--set", f"{name}={shown_value(value)}"]
    return " ".join(map(quote, words))


def _reading_options(reading: Reading) -> list[str]:
    """Return the options that make a command read documents this way."""
    fields = {**({"id": ""} if reading.row_ids else {}), **reading.fields}
    options = ["--fields", ",".join(f"{what}={name}" for what, name in fields.items())] if fields else []
    options += ["--delimiter", "tab" if reading.delimiter == "\t" else reading.delimiter] if reading.delimiter else []
    options += ["--encoding", reading.encoding] if reading.encoding != USUAL.encoding else []
    return [*options, *(["--skip-bad"] if reading.skip_bad else [])]


def training_panels(history: Sequence[Epoch]) -> list[Panel]:
    """Return dev measure by kind, loss and accuracy by level, and churn, over the epochs."""
    accuracy = {
        f"level {t + 1}": [epoch.accuracy[t] if t < len(epoch.accuracy) else None for epoch in history]
        for t in range(max((len(epoch.accuracy) for epoch in history), default=0))
    }
    return [
        Panel("dev measure", {"mean": [epoch.metric for epoch in history], **_series(history, "dev")}),
        Panel("loss", _series(history, "loss")),
        Panel("queries that go the right way", accuracy, is_share=True),
        Panel("documents that moved", {"churn": [e.churn if e.reclustered else None for e in history]}, is_share=True),
    ]


def branches(tree: Hierarchy) -> list[Branch]:
    """Return the tree's first levels, the largest nodes first.

    A node's small children are put together.
    """
    return _below(tree, tree.document_counts(), 0, 0)


def _below(tree: Hierarchy, counts: Sequence[np.ndarray], level: int, node: int) -> list[Branch]:
    if level >= min(tree.depth - 1, DRAWN_LEVELS):
        return []
    sizes = counts[level + 1]
    children = sorted(tree.children(level, node).tolist(), key=lambda child: -sizes[child])
    found = []
    for child in children[:MOST_CHILDREN]:
        name = " · ".join(tree.name(level + 1, child)) or f"node {child}"
        found.append(Branch(name, int(sizes[child]), _below(tree, counts, level + 1, child)))
    others = children[MOST_CHILDREN:]
    return [*found, Branch(f"… {len(others)} more", int(sizes[others].sum()))] if others else found


def _about(model: ModelFolder) -> dict[str, str]:
    facts = model.facts
    seconds = sum(epoch.seconds for epoch in model.history)
    return {
        "corpus": f"{facts.corpus['name']}, {facts.corpus['documents']:,} documents",
        "encoder": facts.encoder,
        "training": f"{facts.recipe['mode']}, {max(len(model.history) - 1, 0)} epochs, {seconds:,.0f} s",
        "learnt": what_was_learned(facts),
        "made by": f"hce {facts.hce}",
    }


def _before_and_after(model: ModelFolder) -> str:
    before, after = model.facts.before, model.facts.after
    compared = compare_several({kind: _scores(model.queries, kind) for kind in before}) if model.queries else {}
    rows = []
    for kind in before:
        row = _measured(kind, before[kind], after[kind])
        if kind in compared:
            paired = compared[kind]
            row += [f"{paired.p_holm:.4f}", f"{paired.better:,}", f"{paired.worse:,}", f"{paired.equal:,}"]
        rows.append(row)
    rows.append(_measured("mean", mean_over_kinds(before), mean_over_kinds(after)))
    header = ["NDCG@10", "before", "after", "difference", "p", "better", "worse", "equal"]
    return html_table(header if compared else header[:4], rows, [False] * len(before) + [True], signed={3})


def _search(chosen: dict[str, Any] | None) -> Iterator[str]:
    """Yield what a search with this model reaches, part by part, and by how much each part counts."""
    if chosen is None:
        return
    calibration = Calibration.read(chosen)
    yield "<h2>The search that users get</h2>"
    yield f"<p>{escape(calibration.summary())}.</p>"
    if calibration.ndcg:
        yield html_table(["nDCG@10 by", ""], ([name, f"{value:.4f}"] for name, value in calibration.ndcg.items()))
    for name, curve in calibration.curves.items():
        header = [f"{name} count", *(f"{share:.2f}" for share, _ in curve)]
        yield html_table(header, [["nDCG@10", *(f"{value:.3f}" for _, value in curve)]])


def _measured(name: str, before: float, after: float) -> list[str]:
    return [name, f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"]


def _scores(queries: Sequence[DevQuery], kind: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return what the queries of a kind scored after and before."""
    of_kind = [query for query in queries if query.kind == kind]
    after = {str(number): query.after for number, query in enumerate(of_kind)}
    return after, {str(number): query.before for number, query in enumerate(of_kind)}


def _changes(queries: Sequence[DevQuery]) -> Iterator[str]:
    """Yield tables of the queries that gained most and that lost most, and a picture of all."""
    ordered = sorted(queries, key=lambda query: query.before - query.after)
    gained = [query for query in ordered if query.after > query.before][:MOST_CHANGED]
    lost = [query for query in reversed(ordered) if query.after < query.before][:MOST_CHANGED]
    for title, some in (("What improved most", gained), ("What got worse", lost)):
        if some:
            yield f"<h2>{title}</h2>"
            header = ["query", "kind", "before", "after", "difference"]
            yield html_table(header, map(_changed, some), signed={4}, is_long=True)
    if queries:
        yield "<h2>Every query</h2>"
        differences = ((query.after - query.before, _short(query.query)) for query in queries)
        yield difference_bars(differences, "NDCG@10 after less before")


def _changed(query: DevQuery) -> list[str]:
    numbers = f"{query.before:.2f}", f"{query.after:.2f}", f"{query.after - query.before:+.2f}"
    return [_short(query.query), query.kind, *numbers]


def _series(history: Sequence[Epoch], name: str) -> dict[str, list[float | None]]:
    """Turn a mapping of each epoch over: for each key its values over the epochs."""
    keys = dict.fromkeys(key for epoch in history for key in getattr(epoch, name))
    return {key.replace("_", " "): [getattr(epoch, name).get(key) for epoch in history] for key in keys}


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:99]}…"
