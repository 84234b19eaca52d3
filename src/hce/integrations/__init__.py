"""Retrievers for LangChain and LlamaIndex; each module needs its framework installed."""
