"""An index in a collection of Milvus: an engine, the mirror that writes it, and replicas that read it."""
