"""Tokenise each word of a corpus once: half of a static encoder's training time was WordPiece on the same words.

BERT's normaliser and pre-tokenizer never look across a space, so the tokens of a text are those of its words side by
side. That is not so of byte-level or sentencepiece tokenizers, where a word's tokens depend on the space before it:
for those there is no memo.
"""

from __future__ import annotations

import json
from itertools import chain

from tokenizers import Tokenizer

MOST_WORDS = 1 << 19  # some 150 MB; words met later are tokenised each time


class WordMemo(dict[str, tuple[int, ...]]):
    """The token ids of each word met so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.limit: int | None = (tokenizer.truncation or {}).get("max_length")

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> WordMemo | None:
        """A memo that gives just what the tokenizer would, or None where words cannot be taken one by one."""
        parts = json.loads(tokenizer.to_str())
        types = [(parts[part] or {}).get("type") for part in ("normalizer", "pre_tokenizer", "model")]
        side = (parts["truncation"] or {}).get("direction", "Right")
        across_spaces = any(
            each["lstrip"] or each["rstrip"] or " " in each["content"] for each in parts["added_tokens"]
        )
        if types != ["BertNormalizer", "BertPreTokenizer", "WordPiece"] or side != "Right" or across_spaces:
            return None
        return cls(tokenizer)

    def __missing__(self, word: str) -> tuple[int, ...]:
        tokens = tuple(self.tokenizer.encode(word, add_special_tokens=False).ids)
        if len(self) < MOST_WORDS and len(tokens) != self.limit:  # a piece as long as the limit may have been cut
            self[word] = tokens
        return tokens

    def ids(self, text: str) -> list[int]:
        """The token ids of a text, cut to the tokenizer's length."""
        return list(chain.from_iterable(map(self.__getitem__, text.split(" "))))[: self.limit]
