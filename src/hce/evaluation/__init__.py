"""How good a search is, and where it goes astray."""
