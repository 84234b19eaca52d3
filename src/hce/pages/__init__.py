"""HTML pages with pictures that need no network."""
