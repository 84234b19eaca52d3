"""Terms: the words of a text as they are matched and counted: lower case, without endings, in any script.

They need to know the language, so this module also notices a corpus in another one than its encoder reads.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import tantivy

from hce.errors import InputError, warn_once

if TYPE_CHECKING:
    from hce.data.corpus import Corpus

logger = logging.getLogger(__name__)

LANGUAGES = (
    *("arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian"),
    *("norwegian", "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish"),
)
"""The languages whose words are stemmed; "none" matches words as written."""

CODES = dict(
    zip(
        LANGUAGES,
        ("ar", "da", "nl", "en", "fi", "fr", "de", "el", "hu", "it", "no", "pt", "ro", "ru", "es", "sv", "ta", "tr"),
        strict=True,
    )
)
"""The ISO 639 codes of the languages, which py3langid gives."""

ENGLISH_ENCODERS = ("static", "minilm")
MULTILINGUAL_ENCODER = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
SAMPLE, BEGINNING = 200, 2000  # documents whose language is looked at, and characters of each
LEAST_LETTERS = 20  # fewer say nothing
SURE = 0.8  # the probability of a language; code and numbers are below

LONGEST_WORD = 255  # bytes; what is longer is no word
MOST_PIECES, LONGEST_PIECE = 1 << 17, 40  # that are remembered, and characters of one: some 40 MB

# From the beginning of a word only: tried at each letter, it took most of the time of a search.
IDENTIFIER = re.compile(r"(?<!\w)\w*?(?:[^\W_]_[^\W_]|[a-z][A-Z]|[A-Z]{2}[a-z]{2})\w*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+|\d+")
# Scripts that put no spaces between words: Thai, Lao, Myanmar, Khmer, Hiragana, Katakana, Han.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")
# Ligatures, forms of Arabic letters by their place, full and half width.
PRESENTED = re.compile(r"[\ufb00-\ufdff\ufe70-\ufeff\uff00-\uffef]+")


def terms(text: str, language: str) -> list[str]:
    """Return the terms of a text, in order.

    >>> terms("Parsing URLs by parse_url", "english")
    ['pars', 'url', 'by', 'parse_url', 'pars', 'url']
    """
    found: list[str] = []
    for piece in text.split():
        found += (_remembered if len(piece) <= LONGEST_PIECE else _terms_between_spaces)(piece, language)
    return found


def _terms_between_spaces(piece: str, language: str) -> tuple[str, ...]:
    return tuple(analyzer(language).analyze(spelled_out(piece)))


_remembered = lru_cache(maxsize=MOST_PIECES)(_terms_between_spaces)  # most pieces come again


def spelled_out(text: str) -> str:
    """Prepare a text for a tokenizer that only splits at spaces.

    An identifier is followed by its parts; a run of a script without spaces becomes its pairs of characters.

    >>> spelled_out("call getUserName or parse_url")
    'call getUserName get User Name or parse_url parse url'
    >>> spelled_out("東京都 in Japan")
    ' 東京 京都  in Japan'
    """
    if not text.isascii():  # NFKC for forms of letters only: it would make one word of "Word™", and 106 of 10⁶
        text = PRESENTED.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)
        text = unicodedata.normalize("NFC", text)
    text = IDENTIFIER.sub(lambda found: " ".join([found[0], *PART.findall(found[0])]), text)
    return UNSPACED.sub(lambda run: f" {' '.join(map(''.join, pairwise(run[0]))) or run[0]} ", text)


def inverse_document_frequency(counts: np.ndarray, total: int) -> np.ndarray:
    """Return BM25's idf, log(1 + (N − df + ½) / (df + ½)), which is above 0 even for a term in every text."""
    return np.log1p((total - counts + 0.5) / (counts + 0.5))


def checked_language(language: str) -> str:
    """Return a language, or fail with InputError if there is no stemmer for it."""
    if language not in (*LANGUAGES, "none"):
        raise InputError(f"language {language!r}: choose one of {', '.join(LANGUAGES)}, or none")
    return language


@cache
def analyzer(language: str) -> Any:
    """Return tantivy's analyzer of texts that were `spelled_out`."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.regex(r"\w+"))
    builder = builder.filter(tantivy.Filter.remove_long(LONGEST_WORD)).filter(tantivy.Filter.lowercase())
    return (builder if language == "none" else builder.filter(tantivy.Filter.stemmer(language))).build()


# ----------------------------------------------------------------------------------------- the language of a corpus


def warn_of_language(corpus: Corpus, encoder: str, language: str = "english") -> None:
    """Warn once if most texts are not in the language of an encoder, given by its name.

    `language` is the stemmer's.
    """
    name = encoder.removesuffix(", fitted")
    step = max(1, len(corpus) // SAMPLE)
    some = range(0, len(corpus), step)[:SAMPLE]
    found = name in ENGLISH_ENCODERS and foreign_language(corpus[position].full_text for position in some)
    if not found:
        return
    fitting = found if found in LANGUAGES else "none"
    stem = "" if fitting == language else f" (index with --language {fitting})"
    warn_once(
        logger,
        f"{corpus.name}: most documents seem to be in {found.capitalize()}, and {name} was trained on English: words "
        f"find them in any language{stem}; for their meaning take a multilingual encoder, such as "
        f"{MULTILINGUAL_ENCODER}",
    )


def foreign_language(texts: Iterable[str]) -> str | None:
    """Return the language of most texts, by its name or ISO 639 code; None for English, code or unclear.

    >>> foreign_language(["Die Katze schläft nicht, und der Hund ist auf dem Sofa."] * 2)
    'german'
    >>> foreign_language(["The cat is not asleep, and the dog is on the sofa."] * 2)
    """
    found = [_language(text[:BEGINNING]) for text in texts]
    code, count = Counter(found).most_common(1)[0] if found else (None, 0)
    if code in (None, "en", "zxx") or count <= len(found) / 2:  # zxx: no language at all
        return None
    return next((name for name, known in CODES.items() if known == code), code)


def _language(text: str) -> str | None:
    """Return the code of a text's language; None if that is not sure."""
    if sum(map(str.isalpha, text)) < LEAST_LETTERS:
        return None
    code, probability = _identifier().classify(text)
    return str(code) if probability >= SURE else None


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # its model is 70 MB, and takes half a second to load

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
