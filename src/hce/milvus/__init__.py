"""An index in a Milvus collection: the engine, the mirror that writes it, and replicas that read it."""
