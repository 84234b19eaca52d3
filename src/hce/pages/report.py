"""A report on a trained model as one HTML file: gains query by query, curves, tree, command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from shlex import quote

from hce.data.records import USUAL, Reading
from hce.evaluation.significance import compare_several
from hce.files import checked_fields
from hce.pages.page import Branch, Panel, definitions, difference_bars, html_page, html_table, line_panels, tree_list
from hce.search.fusion import Calibration
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

MOST_CHANGED = 15  # queries to show with the largest gains, and with the largest losses
MOST_CHILDREN = 12  # of a node in the drawing of the tree
DRAWN_LEVELS = 2  # of the tree, below the root
TREE_AT_WORK = (
    "<p>Training takes its negatives from the tree, so the figures above include the tree's effect. "
    "<code>hce compare DATA --systems hce-hybrid,no-tree-hybrid</code> trains with and without it.</p>"
)


def report(model: ModelFolder) -> str:
    """Return the HTML of the report."""
    facts = model.facts
    seconds = sum(epoch.seconds for epoch in model.history)
    about = {
        "corpus": f"{facts.corpus['name']}, {facts.corpus['documents']:,} documents",
        "encoder": facts.encoder,
        "training": f"{facts.recipe['mode']}, {max(len(model.history) - 1, 0)} epochs, {seconds:,.0f} s",
        "learned": what_was_learned(facts),
        "made by": f"hce {facts.hce}",
    }
    parts = [
        definitions(about),
        "<h2>Before and after</h2>",
        f"<p>{escape(facts.metric)}: <strong>{gains(facts.before, facts.stages, facts.after)}</strong>.</p>",
        "<p>p: could the difference be chance? (paired randomization test over queries, Holm’s correction)</p>",
        _before_and_after(model),
        *(_search(Calibration.read(facts.calibration)) if facts.calibration is not None else ()),
        *([TREE_AT_WORK] if facts.recipe["tree"] else ()),
        *_changes(model.queries),
    ]
    if model.history:
        epochs = [epoch.epoch for epoch in model.history]
        parts += ["<h2>How training went</h2>", line_panels(epochs, training_panels(model.history))]
    if model.tree is not None and model.tree.levels:
        parts += ["<h2>The tree of the corpus</h2>", tree_list(branches(model.tree))]
    parts += ["<h2>To repeat it</h2>", f"<pre>{escape(command(model))}</pre>"]
    return html_page(f"{model.path.name}: {facts.encoder} on {facts.corpus['name']}", parts)


def command(model: ModelFolder) -> str:
    """Return the command that trains this model again, under another name."""
    facts = model.facts
    defaults = Recipe.for_encoder(static=facts.static, train=facts.recipe.get("train", "encoder")).as_dict()
    defaults["train"] = "both" if facts.static else "companion"
    corpus = checked_fields(CorpusFacts, facts.corpus)
    reading = Reading(**(corpus.reading or {}))
    words = ["hce", "train", corpus.source or corpus.name, "-o", f"{model.path.name}-again"]
    words += ["--encoder", facts.base_encoder]
    if fields := {**({"id": ""} if reading.row_ids else {}), **reading.fields}:
        words += ["--fields", ",".join(f"{what}={name}" for what, name in fields.items())]
    if reading.delimiter:
        words += ["--delimiter", "tab" if reading.delimiter == "\t" else reading.delimiter]
    if reading.encoding != USUAL.encoding:
        words += ["--encoding", reading.encoding]
    if reading.skip_bad:
        words.append("--skip-bad")
    if facts.label_files:
        words += ["--labels", ",".join(f"{what}={path}" for what, path in facts.label_files.items())]
    for name, value in facts.recipe.items():
        if value != defaults.get(name):
            words += ["--set", f"{name}={shown_value(value)}"]
    return " ".join(map(quote, words))


def training_panels(history: Sequence[Epoch]) -> list[Panel]:
    """Return panels over the epochs: dev measure, loss, accuracy, moved documents."""

    def series(name: str) -> dict[str, list[float | None]]:
        keys = dict.fromkeys(key for epoch in history for key in getattr(epoch, name))
        return {key.replace("_", " "): [getattr(epoch, name).get(key) for epoch in history] for key in keys}

    accuracy = {
        f"level {t + 1}": [epoch.accuracy[t] if t < len(epoch.accuracy) else None for epoch in history]
        for t in range(max((len(epoch.accuracy) for epoch in history), default=0))
    }
    return [
        Panel("dev measure", {"mean": [epoch.metric for epoch in history], **series("dev")}),
        Panel("loss", series("loss")),
        Panel("queries routed to the right node", accuracy, is_share=True),
        Panel("documents that moved", {"churn": [e.churn if e.reclustered else None for e in history]}, is_share=True),
    ]


def branches(tree: Hierarchy) -> list[Branch]:
    """Return branches of the first levels, largest first; join the smallest into one."""
    counts = tree.document_counts()

    def below(level: int, node: int) -> list[Branch]:
        if level >= min(tree.depth - 1, DRAWN_LEVELS):
            return []
        sizes = counts[level + 1]
        children = sorted(tree.children(level, node).tolist(), key=lambda child: -sizes[child])
        found = [
            Branch(
                " · ".join(tree.name(level + 1, child)) or f"node {child}", int(sizes[child]), below(level + 1, child)
            )
            for child in children[:MOST_CHILDREN]
        ]
        others = children[MOST_CHILDREN:]
        return [*found, Branch(f"… {len(others)} more", int(sizes[others].sum()))] if others else found

    return below(0, 0)


def _before_and_after(model: ModelFolder) -> str:
    before, after = model.facts.before, model.facts.after
    scores: dict[str, tuple[dict[str, float], dict[str, float]]] = {kind: ({}, {}) for kind in before}
    for query in model.queries:
        for by_query, score in zip(scores.get(query.kind, ()), (query.after, query.before), strict=False):
            by_query[str(len(by_query))] = score
    compared = compare_several(scores) if model.queries else {}
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


def _measured(name: str, before: float, after: float) -> list[str]:
    return [name, f"{before:.4f}", f"{after:.4f}", f"{after - before:+.4f}"]


def _search(calibration: Calibration) -> Iterator[str]:
    """Yield tables of nDCG@10: by each part of the search, and by each part's share."""
    yield f"<h2>The search that users get</h2><p>{escape(calibration.summary())}.</p>"
    if calibration.ndcg:
        yield html_table(["nDCG@10 by", ""], ([name, f"{value:.4f}"] for name, value in calibration.ndcg.items()))
    for name, curve in calibration.curves.items():
        header = [f"share of {name}", *(f"{share:.2f}" for share, _ in curve)]
        yield html_table(header, [["nDCG@10", *(f"{value:.3f}" for _, value in curve)]])


def _changes(queries: Sequence[DevQuery]) -> Iterator[str]:
    """Yield the queries that gained or lost most, and a chart of all."""
    texts = (query.query if len(query.query) <= 100 else f"{query.query[:99]}…" for query in queries)
    rows = [(query.after - query.before, text, query) for text, query in zip(texts, queries, strict=True)]
    ordered = sorted(rows, key=lambda row: -row[0])
    for title, some in (
        ("What improved most", [row for row in ordered if row[0] > 0]),
        ("What got worse", [row for row in reversed(ordered) if row[0] < 0]),
    ):
        if some:
            yield f"<h2>{title}</h2>"
            shown = [
                [text, query.kind, f"{query.before:.2f}", f"{query.after:.2f}", f"{difference:+.2f}"]
                for difference, text, query in some[:MOST_CHANGED]
            ]
            yield html_table(["query", "kind", "before", "after", "difference"], shown, signed={4}, is_long=True)
    if queries:
        yield "<h2>Every query</h2>"
        yield difference_bars([row[:2] for row in rows], "NDCG@10 after minus before")
