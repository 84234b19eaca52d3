"""The tree of a corpus: k-means, the paper's Alg. 1, names of nodes, and a map."""
