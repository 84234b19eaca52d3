"""Reading what people have: documents, queries, judgments."""
