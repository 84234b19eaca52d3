"""A durable, incremental index."""
