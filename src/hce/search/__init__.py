"""Vector search behind one small protocol."""
