"""Vector search behind one small protocol: flat, hnsw, ivf, tree."""
