"""The command `hce mcp`: an index as tools of an agent that starts this process."""

from __future__ import annotations

from hce.commands.common import ReadIndexArgument, err


def mcp(path: ReadIndexArgument) -> None:
    """Serve an index to an agent over stdin and stdout, by the Model Context Protocol.

    The tools search, fetch, browse the tree and find similar documents; none of them writes. Clients start this
    command themselves: see docs/agents.md for the lines to give them. `hce serve` answers the same at /mcp.

    Examples:
      hce mcp my-index
    """
    from hce.index.browse import LiveTree
    from hce.index.index import Index
    from hce.web.mcp import Tools

    with Index.open(path) as index:
        index.prepare()
        server = Tools(index, LiveTree(index)).server()
        err.print(f"{len(index):,} documents of {path} for an agent on stdin (Ctrl-C stops)", soft_wrap=True)
        server.run("stdio")
