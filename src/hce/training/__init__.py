"""The losses and the co-training of encoder and tree, the paper's Alg. 3."""
