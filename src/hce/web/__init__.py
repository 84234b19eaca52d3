"""The web page of an index: search, before and after, the tree, adding and removing; `hce serve` starts it."""
