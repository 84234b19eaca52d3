"""Commands that read an index: `hce search`, `status`, `serve`, `mcp`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, cast

from rich.text import Text
from typer import Argument, Option

from hce.commands import common
from hce.errors import InputError
from hce.progress import progress_bar

if TYPE_CHECKING:
    from hce.index.drift import Drift, GrownNode
    from hce.index.manifest import IndexStatus
    from hce.index.ranking import Hit, SearchMode
    from hce.training.model_folder import Training

SNIPPET = 160  # characters
FOLDED = 5  # ids of near-equal documents to show
BLANKS = re.compile(r"\s+")
SEARCHED = "the folder of the index, the Milvus file (.db) it writes to, or the address of a running hce serve"
RERANK: dict[str, Any] = {"metavar": "DIR|HUB-ID", "callback": common.known_reranker, "show_default": False}
ADVICE = {
    "ok": "nothing to do",
    "re-cluster": "hce rebuild grows the tree again, without training",
    "retrain": "hce train on the current documents, then hce reindex with the new model",
    "unknown": "too few new documents to judge",
}


def search(
    address: Annotated[str, Argument(metavar="index", help=SEARCHED, show_default=False)],
    text: Annotated[str, Argument(help="what to look for, or - to read it from stdin", show_default=False)],
    k: Annotated[int, Option("-k", help="how many documents to show")] = 10,
    where: Annotated[
        list[str] | None,
        Option(
            "--where", "-w", metavar="CONDITION", help="a condition on metadata: 'lang=en', 'year>=2000', 'tag in a,b'"
        ),
    ] = None,
    mode: Annotated[str, Option(help="hybrid (words and meaning), dense (meaning only) or words")] = "hybrid",
    unique: Annotated[bool, Option("--unique", help="show near-equal documents once")] = False,
    rerank: Annotated[str | None, Option(help="re-rank the first hits with this cross-encoder", **RERANK)] = None,
    depth: Annotated[int, Option(help="how many of the first hits --rerank reads")] = 50,
    facet: Annotated[
        list[str] | None,
        Option(
            "--facet", metavar="FIELD", help="also count this field's values, over all documents that match --where"
        ),
    ] = None,
    token: Annotated[
        str | None, Option(envvar="HCE_TOKEN", help="the token of the server at that address, or of its proxy")
    ] = None,
    trust_address: common.TrustOption = False,
    as_json: common.JsonOption = False,
) -> None:
    """Search an index by words and by meaning.

    Each hit shows the snippet with most of the query's words, in bold. For a long document it is the best passage.
    Several --where conditions must all hold. The score of a hybrid search is the sum of its parts from meaning, words
    and tokens, which are shown too. With --rerank the score is the cross-encoder's, and the earlier rank is shown.

    Search by meaning ranks every document, so it always returns hits. The first line says if nothing is a good match
    (good_match in --json). With --where this is unknown (null). For the same reason --facet counts all documents that
    match --where, not only the hits. --json gives all fields, with the positions of the query's words.

    Examples:
      hce search my-index "how do plants make sugar" -k 5
      hce search my-index "court rulings" --where 'year>=2000' --where 'year<2010' --where 'lang in en,fr'
      hce search my-index "court rulings" --where 'meta.final=true' --where 'kind!=memo'
      hce search my-index "ERR_4012" --mode words
      hce search my-index "court rulings" --where 'lang=en' --facet year --facet court
      hce search my-index "how do plants make sugar" --unique --rerank cross-encoder/ms-marco-MiniLM-L6-v2
      hce search my-index - --json < question.txt
      hce search http://127.0.0.1:8080 "how do plants make sugar"
      hce search milvus.db "how do plants make sugar"
    """
    from hce.data.records import STDIN, read_lines
    from hce.data.text import is_url
    from hce.index.derived import trust_address_of
    from hce.index.filters import parse_clauses
    from hce.index.index import Index

    if text == STDIN:
        text = "\n".join(line.text for line in read_lines(STDIN))
    conditions = parse_clauses(where) if where else None
    facets: dict[str, Any] = {}
    if is_url(address):
        if rerank or facet:
            raise InputError("--rerank and --facet need the folder of an index, not the address of a server")
        from hce.web.client import Client

        hits, good_match = Client(address, token).search(text, k, where or (), mode, unique=unique)
    else:
        if trust_address:
            trust_address_of(address)
        how = cast("SearchMode", mode)
        with Index.open(address) as index:
            index.with_paths = as_json  # only JSON shows each hit's place in the tree
            hits = index.search(text, k, conditions, how, unique=unique, rerank=rerank, depth=depth)
            good_match = index.good_match(text, hits, conditions, how)
            facets = index.facets(facet or [], conditions)
    if as_json:
        counted = {field: [each._asdict() for each in counts] for field, counts in facets.items()}
        shown = [hit.as_dict(text) for hit in hits]
        common.print_json({"query": text, "good_match": good_match, "hits": shown, "facets": counted})
        return
    if good_match is False:
        common.show("nothing here is a good match; the closest:")
    for hit in hits:
        common.show(_line(hit, text, mode))
    if not hits:
        common.show(_why_nothing(mode, has_conditions=bool(conditions)))
    for field, counts in facets.items():
        values = " · ".join(f"{each.value} {each.documents:,}" for each in counts)
        common.show(f"{field}: {values or 'no values'}")


def status(
    path: common.ReadIndexArgument,
    drift: Annotated[bool, Option("--drift/--no-drift", help="also measure whether it is time to retrain")] = True,
    seed: common.SeedOption = 0,
    trust_address: common.TrustOption = False,
    as_json: common.JsonOption = False,
) -> None:
    """Show the contents and changes of an index, and whether it is time to retrain.

    Examples:
      hce status my-index
      hce status my-index --no-drift --json
    """
    from hce.index.derived import trust_address_of
    from hce.index.index import Index

    if trust_address:
        trust_address_of(path)
    with Index.open(path) as index:
        from hce.training.model_folder import IN_AN_INDEX, read_training

        found = index.status()
        training = read_training(index.path / index.state.manifest.folder_of(IN_AN_INDEX))
        verdict = index.drift(seed) if drift else None
    if as_json:
        known = training and {name: getattr(training, name) for name in ("metric", "before", "after", "stages")}
        common.print_json({**found.as_dict(), "training": known, "drift": verdict.as_dict() if verdict else None})
        return
    for name, value in {**_status_lines(found, training), **(_drift_lines(verdict) if verdict else {})}.items():
        common.show(f"{name:<10} {value}")


def serve(
    path: common.ReadIndexArgument,
    host: Annotated[str, Option(help="the address to listen at; 0.0.0.0 lets the network connect")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="the port to listen at; 0 picks a free one")] = 8080,
    token: Annotated[
        str | None,
        Option(envvar="HCE_TOKEN", help="the token for writing; a random one if other machines can connect"),
    ] = None,
    name: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="another host name that requests may use for this server; may be repeated"),
    ] = None,
    read_only: Annotated[bool, Option("--read-only", help="refuse to add or remove documents")] = False,
    learn_queries: Annotated[
        bool,
        Option("--learn-queries", help="keep the mean vector of all queries, not their texts, for `hce train`"),
    ] = False,
    no_metrics: Annotated[bool, Option("--no-metrics", help="do not serve /metrics")] = False,
    open_browser: Annotated[bool, Option("--open", help="open the page in a browser")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Serve an index as a web page and an API, for searching and for writing.

    By default only this machine can connect. With another --host, anyone on that network can read, and writing needs a
    token: yours, or a random one that is printed. Requests must use an address or a name that the server knows (this
    machine's name, --host, --name), against DNS rebinding. Ctrl-C stops the server. /docs describes the API.

    Examples:
      hce serve my-index --open
      hce serve my-index --port 0 --json
      HCE_TOKEN=… hce serve my-index --host 0.0.0.0
      hce serve my-index --learn-queries                # then: hce train … --labels log=my-index
      hce serve my-index --name search.example.org      # behind a proxy on this machine
    """
    import webbrowser

    from hce.index.index import Index
    from hce.memory import use_few_arenas

    use_few_arenas()
    with Index.open(path) as index:
        with progress_bar("loading", None, "modules"):  # imports take seconds, so a wrong path fails first
            from hce.web.app import Server, create_app, listen, url_of
            from hce.web.guard import rules_for

        rules = rules_for(host, token, not (read_only or index.is_replica), name or ())
        made_up = rules.token if rules.token != token else None  # do not print a given token: logs would keep it
        listener = listen(host, port)
        index.prepare()
        url = url_of(host, listener)

        def started() -> None:
            needed = f"\nwriting needs the token {made_up}" if made_up else ""
            facts = {"url": url, "documents": len(index), "token": made_up}
            common.answer(f"{len(index):,} documents at {url} (Ctrl-C stops){needed}", facts, as_json)
            if open_browser:
                webbrowser.open(url)

        app = create_app(index, rules, metrics=not no_metrics, learns=learn_queries)
        Server(app, listener, started).serve_until_stopped()
    common.note("stopped")


def mcp(path: common.ReadIndexArgument) -> None:
    """Serve an index to an agent over stdin and stdout (Model Context Protocol).

    The tools search, fetch, browse the tree and find similar documents; none writes. The agent's client starts this
    command: docs/guide.md shows how to configure it. `hce serve` offers the same tools at /mcp.

    Examples:
      hce mcp my-index
    """
    from hce.index.index import Index
    from hce.index.tree import LiveTree
    from hce.web.mcp import Tools

    with Index.open(path) as index:
        index.prepare()
        common.note(f"{len(index):,} documents of {path} for an agent on stdin (Ctrl-C stops)")
        Tools(index, LiveTree(index)).server().run("stdio")


def _why_nothing(mode: str, *, has_conditions: bool) -> str:
    """Return why there are no hits: no word in common, or no document to search."""
    if mode == "words":
        return f"no document {'that matches the conditions ' if has_conditions else ''}shares a word with the query"
    return "no document matches the conditions" if has_conditions else "the index is empty"


def _line(hit: Hit, query: str, mode: str) -> Text:
    """Format a hit: rank, score, id, title, snippet and near-equal documents.

    Only the score of a hybrid search has parts. The part from meaning is 0 for the candidate with the lowest cosine.
    With a cross-encoder's score, the earlier rank is shown instead.
    """
    line = Text(f"{hit.rank:>3}  {hit.score:.4f}  ")
    if hit.first_rank is not None:
        line.append(f"was {hit.first_rank}  ", style="dim")
    elif mode == "hybrid" and (hit.from_words or hit.from_tokens):
        parts = [f"{hit.from_meaning:.2f} meaning"]
        parts += [f"{hit.from_tokens:.2f} tokens"] if hit.from_tokens else []
        parts += [f"{hit.from_words:.2f} {' '.join(hit.matched) or 'common words'}"] if hit.from_words else []
        line.append(f"= {' + '.join(parts)}  ", style="dim")
    line.append(hit.id, style="bold")
    if hit.title and hit.title != hit.id:
        line.append(f"  {' '.join(hit.title.split())}")
    if snippet := _snippet(hit, query):
        line.append("\n     ").append_text(snippet)
    if hit.folded:
        shown = ", ".join(hit.folded[:FOLDED]) + (" …" if len(hit.folded) > FOLDED else "")
        line.append(f"\n     and {len(hit.folded):,} near-equal: {shown}", style="dim")
    return line


def _snippet(hit: Hit, query: str) -> Text:
    """Format the best passage, or the part with most of the query's words."""
    found = hit.snippet(query, SNIPPET)
    shown = Text("… " if found.start else "", style="dim")
    end = 0
    for start, stop in found.marks:
        shown.append(BLANKS.sub(" ", found.text[end:start])).append(found.text[start:stop], style="bold not dim")
        end = stop
    shown.append(BLANKS.sub(" ", found.text[end:]))
    shown.rstrip()
    return shown.append(" …") if found.start + len(found.text) < len(hit.text) else shown


def _status_lines(found: IndexStatus, training: Training | None) -> dict[str, str]:
    base = f", trained from {found.base_encoder}" if found.base_encoder else ""
    changes = "change" if found.pending == 1 else "changes"
    pending = f", its snapshot {found.pending:,} {changes} behind" if found.pending else ""
    quality = ""
    if found.recall is not None:
        quality = f", scores {found.rescored} candidates again and finds {found.recall:.1%} of the ten nearest"
    curves = {  # every other point of the curve
        name: "nDCG@10 " + ", ".join(f"{value:.3f} at {share:g}" for share, value in points[::2])
        for name, points in found.curves.items()
    }
    return {
        "documents": f"{found.documents:,} ({found.added:,} added and {found.removed:,} removed since it was made)",
        "encoder": f"{found.encoder} ({found.fingerprint[:12]}, {found.dim} dimensions{base})",
        **_history_lines(found, training),
        "engine": f"{found.engine}{quality}{pending}",
        "search": found.search,
        **curves,
        "tree": f"{found.tree_levels} levels" if found.tree_levels else "none",
        "on disk": f"{found.bytes / 1e6:,.1f} MB, format {found.format}",
        "created": found.created,
        "changed": found.changed,
    }


def _history_lines(found: IndexStatus, training: Training | None) -> dict[str, str]:
    """Format what the table was fitted to, reindexings, and the gain of training."""
    lines = {}
    if found.fitted_documents is not None:
        advice = f"; hce rebuild {found.path} fits it to all {found.documents:,}"
        documents = "document" if found.fitted_documents == 1 else "documents"
        lines["fitted"] = f"to {found.fitted_documents:,} {documents}{advice if found.has_outgrown_its_table else ''}"
    if found.reindexing:
        lines["reindexing"] = f"to {found.reindexing} is under way, or was interrupted"
    elif found.earlier:
        lines["before"] = f"{found.earlier}; hce reindex {found.path} --undo returns to it"
    if training is not None:
        from hce.training.model_folder import gains

        lines["trained"] = f"{gains(training.before, training.stages, training.after)} ({training.metric})"
    return lines


def _drift_lines(drift: Drift) -> dict[str, str]:
    """Format the drift verdict and its numbers."""
    lines = {"verdict": f"{drift.verdict}: {'; '.join(drift.reasons)} ({ADVICE[drift.verdict]})"}
    for name, kind in (("old", drift.old), ("new", drift.new)):
        if kind is not None:
            found = "unknown" if kind.found is None else f"{kind.found:.0%}"
            lines[f"  {name}"] = (
                f"{kind.documents:,} documents: cosine to a leaf {kind.cosine:.3f} ± {kind.spread:.3f}, "
                f"astray {kind.astray:.0%}, found by a piece of their text {found}"
            )
    if drift.grown:
        lines["grew"] = f"\n{'':<11}".join(map(_grown, drift.grown))
    return lines


def _grown(region: GrownNode) -> str:
    """Format a region of the tree that grew, with its new words."""
    name, words = ", ".join(region.name) or f"node {region.node}", ", ".join(region.words)
    return f"{name}: {region.before:,} documents, {region.added:,} new{f'; new words: {words}' if words else ''}"
