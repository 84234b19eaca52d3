"""POST /v1/embeddings: an index's encoder for OpenAI's clients, and for whatever speaks as they do."""

from __future__ import annotations

import base64
from typing import Literal

import numpy as np
from fastapi import APIRouter, Request
from pydantic import BaseModel, Field, ValidationError

from hce.data.text import is_unicode
from hce.errors import HceError, InputError
from hce.progress import check_deadline
from hce.web.api import NO_STORE, Served, ServedIndex
from hce.web.background import BusyError
from hce.web.schemas import TEXT_CHARACTERS, Json

PATH = "/v1/embeddings"
INPUTS = 2048
AT_ONCE = 32  # texts encoded between two looks at the deadline

router = APIRouter()


class EmbeddingsRequest(BaseModel):
    """What OpenAI's clients send.

    `input_type` says which side of a retrieval the texts are on.
    """

    input: str | list[str] = Field(description=f"a text, or up to {INPUTS:,} texts")
    model: str = Field(default="", description="any name: there is one encoder, and the answer names it")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, description="none but the encoder's own")
    input_type: Literal["document", "query"] = "document"

    def texts(self) -> list[str]:
        """Return the texts; refuse none, too many, and one that cannot be encoded."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        if not 1 <= len(texts) <= INPUTS:
            raise InputError(f"input has {len(texts):,} texts; send 1 to {INPUTS:,} at once")
        for number, text in enumerate(texts):
            if not text.strip() or not is_unicode(text):
                raise InputError(f"input[{number}] is {'not Unicode' if text.strip() else 'empty'}; leave it out")
            if len(text) > TEXT_CHARACTERS:
                raise InputError(f"input[{number}] has {len(text):,} characters; {TEXT_CHARACTERS:,} are the limit")
        return texts


@router.post(
    PATH,
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": EmbeddingsRequest.model_json_schema()}}}},
)
async def embeddings(site: Served, request: Request) -> Json:
    """Encode texts to unit vectors with the index's encoder, as OpenAI's API has it."""
    try:
        asked = EmbeddingsRequest.model_validate_json(await request.body())
        texts, dim = asked.texts(), site.index.state.manifest.dim
        if asked.dimensions not in (None, dim):
            raise InputError(f"dimensions = {asked.dimensions}: this encoder has {dim}, and cannot be cut")
        vectors = await site.embeddings.run(_encode, site, texts, asked.input_type)
    except (ValidationError, BusyError, HceError) as error:
        return _refused(site, error)
    spell = _base64 if asked.encoding_format == "base64" else np.ndarray.tolist
    data = [{"object": "embedding", "index": row, "embedding": spell(each)} for row, each in enumerate(vectors)]
    words = sum(len(text.split()) for text in texts)  # tokens would need a second pass of the tokenizer
    usage = {"prompt_tokens": words, "total_tokens": words}
    model = site.shown(site.index.state.manifest.encoder)
    return Json({"object": "list", "model": model, "data": data, "usage": usage}, headers=NO_STORE)


def _encode(site: ServedIndex, texts: list[str], side: str) -> np.ndarray:
    encode = site.index.state.encode_queries if side == "query" else site.index.encode_documents
    vectors = []
    for start in range(0, len(texts), AT_ONCE):
        check_deadline()
        vectors.append(encode(texts[start : start + AT_ONCE]))
    return np.concatenate(vectors)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


def _refused(site: ServedIndex, error: Exception) -> Json:
    """Refuse a request in the form that OpenAI's clients read."""
    status, sentence = 500, site.shown(site.sentence(error))
    if isinstance(error, ValidationError):
        fault = error.errors(include_url=False)[0]
        where = str(fault["loc"][0]) if fault["loc"] else "the body"
        status, what = 400, "send a text or a list of texts, not tokens" if where == "input" else fault["msg"]
        sentence = f"{where}: {what}"
    elif isinstance(error, BusyError):
        status, sentence = 503, "too many requests are waiting; try again in a moment"
    elif isinstance(error, InputError):
        status = 400
    kind = "invalid_request_error" if status < 500 else "server_error"
    told = {"message": sentence, "type": kind, "param": None, "code": None}
    return Json({"error": told}, status, {"retry-after": "1"} if status == 503 else None)
