"""One module a command or two: parse, call, print; no logic."""
