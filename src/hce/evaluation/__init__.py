"""Measures of a search, significance, and the levels of a tree at which queries go astray."""
