"""Search by vectors, by words, and by both."""
