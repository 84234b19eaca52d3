"""A LlamaIndex retriever: `HceRetriever(Index.open("my-index"), k=5)`."""

from __future__ import annotations

from hce.errors import needs_extra
from hce.index.filters import Filter
from hce.index.index import Index
from hce.index.ranking import SearchMode

with needs_extra("llamaindex", "LlamaIndex's retriever"):
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode


class HceRetriever(BaseRetriever):
    """Finds k documents in an index; `filter` and `mode` work as in `Index.search`."""

    def __init__(self, index: Index, k: int = 10, filter: Filter | None = None, mode: SearchMode = "hybrid") -> None:  # noqa: A002
        self.index, self.k, self.filter, self.mode = index, k, filter, mode
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(
                node=TextNode(id_=hit.id, text=hit.text, metadata={**hit.metadata, "title": hit.title}),
                score=hit.score,
            )
            for hit in self.index.search(query_bundle.query_str, self.k, self.filter, self.mode)
        ]
