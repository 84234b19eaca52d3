"""The server that `hce serve` runs: the web page, the API, MCP, metrics, and their limits."""
