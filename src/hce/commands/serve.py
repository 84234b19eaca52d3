"""`hce serve` and `hce mcp`: an index as a web page and an API, and as tools of an agent."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from hce.commands.common import JsonOption, ReadIndexArgument, answer, err, note
from hce.progress import progress_bar


def serve(
    path: ReadIndexArgument,
    host: Annotated[str, Option(help="where to listen; 0.0.0.0 lets all of the network in")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one")] = 8080,
    token: Annotated[
        str | None,
        Option(envvar="HCE_TOKEN", help="what writing needs; made up where others than this machine can connect"),
    ] = None,
    name: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="of this server, in addition to its addresses; may be given more than once"),
    ] = None,
    read_only: Annotated[bool, Option("--read-only", help="nobody can add or remove documents")] = False,
    learn_queries: Annotated[
        bool,
        Option("--learn-queries", help="keep the mean of all queries, not their texts, for `hce train`"),
    ] = False,
    no_metrics: Annotated[bool, Option("--no-metrics", help="no /metrics for a monitor")] = False,
    open_browser: Annotated[bool, Option("--open", help="open the page in a browser")] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve an index as a web page and an API: search, before and after training, the tree, adding and removing.

    Only this machine can connect, unless --host says otherwise; then anyone on that network can read, and writing
    needs the token that is printed. Requests must call it by an address or by a name that it knows (this machine's,
    --host and --name), so that no other site can make itself look like this one. Ctrl-C stops it. The API is described
    at /docs.

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
        with progress_bar("loading", None, "modules"):  # which takes seconds: after the index is found
            from hce.web.app import Server, create_app, listen, url_of
            from hce.web.guard import rules_for

        rules = rules_for(host, token, not (read_only or index.is_replica), name or ())
        made_up = rules.token if rules.token != token else None  # who gave a token knows it, and a log need not
        listener = listen(host, port)
        index.prepare()
        url = url_of(host, listener)

        def started() -> None:
            told = f"\nwriting needs the token {made_up}" if made_up else ""
            facts = {"url": url, "documents": len(index), "token": made_up}
            answer(f"{len(index):,} documents at {url} (Ctrl-C stops){told}", facts, as_json)
            if open_browser:
                webbrowser.open(url)

        app = create_app(index, rules, metrics=not no_metrics, learns=learn_queries)
        Server(app, listener, started).serve_until_stopped()
    err.print("stopped")


def mcp(path: ReadIndexArgument) -> None:
    """Serve an index to an agent over stdin and stdout, by the Model Context Protocol.

    The tools search, fetch, browse the tree and find similar documents; none writes. Clients start this command:
    docs/guide.md has the lines to give them. `hce serve` answers the same at /mcp.

    Examples:
      hce mcp my-index
    """
    from hce.index.index import Index
    from hce.index.tree import LiveTree
    from hce.web.mcp import Tools

    with Index.open(path) as index:
        index.prepare()
        note(f"{len(index):,} documents of {path} for an agent on stdin (Ctrl-C stops)")
        Tools(index, LiveTree(index)).server().run("stdio")
