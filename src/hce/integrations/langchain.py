"""A LangChain retriever: `HceRetriever(index=Index.open("my-index"), k=5)`."""

from __future__ import annotations

from typing import Any

from hce.errors import needs_extra
from hce.index.index import Index
from hce.index.ranking import SearchMode

with needs_extra("langchain", "LangChain's retriever"):
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document as LangChainDocument
    from langchain_core.retrievers import BaseRetriever
    from pydantic import ConfigDict


class HceRetriever(BaseRetriever):
    """Finds k documents in an index; `filter` and `mode` work as in `Index.search`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    index: Index
    k: int = 10
    filter: dict[str, Any] | None = None
    mode: SearchMode = "hybrid"

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[LangChainDocument]:
        return [
            LangChainDocument(
                page_content=hit.text,
                id=hit.id,
                metadata={**hit.metadata, "id": hit.id, "title": hit.title, "score": hit.score},
            )
            for hit in self.index.search(query, self.k, self.filter, self.mode)
        ]
