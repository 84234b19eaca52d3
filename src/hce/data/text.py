"""The Document, and functions of its text: terms, spans, passages, snippets, and the language.

Terms are the words of a text for matching and counting: lowercased and stemmed, in any script. Stemming depends on the
language. `warn_of_language` warns if an English encoder gets a corpus in another language.

A passage ends at the last sentence end in its last quarter; if no sentence ends there, between two words or, failing
that, two tokens. The next passage begins before that end, so a phrase at the cut is complete in one of the two.

The words marked in a snippet do not explain a hit's score, since an encoder compares meanings and not words.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tantivy

from hce.errors import InputError, warn_once

if TYPE_CHECKING:
    from hce.data.corpus import Corpus

logger = logging.getLogger(__name__)

# Vowel signs and accents that are separate characters: tantivy counts them as part of a word, Python's \w does not.
COMBINING = "".join(chr(code) for code in range(0x300, 0x1E94B) if unicodedata.category(chr(code))[0] == "M")
ANY_WORD = re.compile(rf"[\w{COMBINING}]+")
# Splits nearly as BERT's tokenizer does in its first step; used with every encoder.
WORD_OR_MARK = re.compile(rf"[\w{COMBINING}]+|[^\w\s{COMBINING}]")
LOOK_BACK = 4  # a passage ends up to a quarter before its limit; the next begins up to a quarter before that end
OVERLAP = 8  # at least an eighth of a passage is repeated in the next one
SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*\s+|[。！？]|\n\s*")
READ_AT_ONCE = 1 << 20  # characters given to a tokenizer at once; a tokenizer needs about a hundred bytes for each

SNIPPET_CHARACTERS = 320
PASSAGE_CHARACTERS = 2000  # passages up to this length are shown in full; hardly any is longer
READ_CHARACTERS = 20_000  # of a document: only these are searched for the query's words
READ_IN_ALL = 1_000_000  # characters searched in all hits of a query together: the more hits, the fewer in each
MOST_WORDS = 64  # of a query, from its first: only these are marked; a text all in yellow does not help
MOST_MARKS = 200  # in a text
BLANK = re.compile(r"\s")
ENDING = 3  # letters at most after a query's word: "thread" marks "threads" and "threaded"
FUNCTION_WORDS = frozenset(  # English words that almost every text has; importing scikit-learn's list takes a second
    ANY_WORD.findall("""
    a about above after again against all also am an and any are as at be because been before being below between both
    but by can could did do does doing down during each few for from further had has have having he her here hers
    him his how i if in into is it its itself just me more most my no nor not now of off on once only or other our ours
    out over own same she should so some such than that the their theirs them then there these they this those through
    to too under until up very was we were what when where which while who whom why will with would you your
    yours""")
)

LANGUAGES = (
    *("arabic", "danish", "dutch", "english", "finnish", "french", "german", "greek", "hungarian", "italian"),
    *("norwegian", "portuguese", "romanian", "russian", "spanish", "swedish", "tamil", "turkish"),
)
"""The languages whose words are stemmed; "none" stems no words."""

CODES = dict(
    zip(
        LANGUAGES,
        ("ar", "da", "nl", "en", "fi", "fr", "de", "el", "hu", "it", "no", "pt", "ro", "ru", "es", "sv", "ta", "tr"),
        strict=True,
    )
)
"""ISO 639 codes of the languages, as py3langid returns them."""

ENGLISH_ENCODERS = ("static", "minilm")
MULTILINGUAL_ENCODER = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
SAMPLE, BEGINNING = 200, 2000  # documents whose language is detected, and characters of each
LEAST_LETTERS = 20  # fewer do not identify a language
SURE = 0.8  # the least probability to accept a language; program code and numbers stay below

LONGEST_WORD = 255  # bytes; anything longer is not a word
MOST_PIECES, LONGEST_PIECE = 1 << 17, 40  # cached pieces, and characters of the longest; the cache takes about 40 MB

# Match at the beginning of a word only: trying each letter took most of a search's time.
IDENTIFIER = re.compile(r"(?<!\w)\w*?(?:[^\W_]_[^\W_]|[a-z][A-Z]|[A-Z]{2}[a-z]{2})\w*")
PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_A-Za-z]+|\d+")
# Scripts that put no spaces between words: Thai, Lao, Myanmar, Khmer, Hiragana, Katakana, Han.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")
# Ligatures, positional forms of Arabic letters, and characters of full and half width.
PRESENTED = re.compile(r"[\ufb00-\ufdff\ufe70-\ufeff\uff00-\uffef]+")

Offsets = Sequence[tuple[int, int]]
"""Start and end of each word or punctuation mark of a text, or of each token of an encoder."""
Mark = tuple[int, int]
"""Start and end of a marked word, in code points."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text with an id. `title` may be empty.

    `metadata` holds all other fields of the source.
    """

    id: str
    text: str
    title: str = ""
    metadata: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def full_text(self) -> str:
        """What an encoder reads: title and text joined by a space, BEIR's convention."""
        return f"{self.title} {self.text}".strip()

    @property
    def is_empty(self) -> bool:
        """Whether title and text are both empty."""
        return not self.full_text

    def to_json(self) -> str:
        """Return one JSONL line, without the line break.

        A metadata value without a JSON type becomes a string.
        """
        fields = {"_id": self.id, "title": self.title, "text": self.text, "metadata": self.metadata}
        line = json.dumps(fields, ensure_ascii=False, default=str)
        return line.encode("utf-8", "backslashreplace").decode()  # writes half a surrogate pair as its JSON escape


class Span(NamedTuple):
    """A span of a text, and the rest of the text without it."""

    inside: str
    outside: str


def word_offsets(text: str) -> Offsets:
    """Return the start and end of each word and punctuation mark."""
    return [match.span() for match in WORD_OR_MARK.finditer(text)]


def cut_span(text: str, length: int, place: float, offsets: Offsets | None = None) -> Span:
    """Cut out `length` words and punctuation marks, or `length` pieces at `offsets`.

    `place` is 0 for the beginning, 1 for the end. A text of fewer than 2·`length` pieces loses half of them.

    >>> cut_span("The quick brown fox jumps over the lazy dog.", 2, 0.25)
    Span(inside='brown fox', outside='The quick jumps over the lazy dog.')
    """
    pieces = word_offsets(text) if offsets is None else offsets
    length = min(length, len(pieces) // 2)
    if length < 1:
        return Span(text, text)
    start = min(int(place * (len(pieces) - length + 1)), len(pieces) - length)
    first, last = pieces[start][0], pieces[start + length - 1][1]
    return Span(text[first:last], f"{text[:first].rstrip()} {text[last:].lstrip()}".strip())


def text_pieces(text: str) -> Iterator[str]:
    """Cut a long text into pieces for a tokenizer, at blanks if there are any."""
    start = 0
    while len(text) - start > READ_AT_ONCE:
        stop = text.rfind(" ", start + 1, start + READ_AT_ONCE)
        stop = stop if stop > 0 else text.rfind("\n", start + 1, start + READ_AT_ONCE)
        stop = stop if stop > 0 else start + READ_AT_ONCE
        yield text[start:stop]
        start = stop
    yield text[start:]


def first_words(text: str, count: int) -> str:
    """Return a text up to the end of its first `count` words and punctuation marks.

    >>> first_words("one two three, four", 4)
    'one two three,'
    """
    last = next(islice(WORD_OR_MARK.finditer(text), count - 1, None), None)
    return text[: last.end()] if last else text


def hash64(text: str, *, signed: bool = False) -> int:
    """Return 64 bits of a text's BLAKE2b digest, as a `signed` integer or not.

    >>> hash64("a"), hash64("a", signed=True)
    (3405396810240292928, 3405396810240292928)
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=signed)


def is_unicode(text: str) -> bool:
    """Return whether a text is free of half surrogate pairs, which JSON can express.

    >>> is_unicode("é"), is_unicode(chr(0xD800))
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_url(text: str) -> bool:
    """Return whether a text is an HTTP address, and not a path."""
    return text.lower().startswith(("http://", "https://"))


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


_remembered = lru_cache(maxsize=MOST_PIECES)(_terms_between_spaces)  # most pieces of a text occur again


def spelled_out(text: str) -> str:
    """Split identifiers and scripts without spaces into words for the tokenizer.

    An identifier is followed by its parts; a run of a script without spaces becomes its pairs of characters.

    >>> spelled_out("call getUserName or parse_url")
    'call getUserName get User Name or parse_url parse url'
    >>> spelled_out("東京都 in Japan")
    ' 東京 京都  in Japan'
    """
    if not text.isascii():  # NFKC only for PRESENTED: elsewhere NFKC would turn "Word™" into "WordTM", 10⁶ into 106
        text = PRESENTED.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)
        text = unicodedata.normalize("NFC", text)
    text = IDENTIFIER.sub(lambda found: " ".join([found[0], *PART.findall(found[0])]), text)
    return UNSPACED.sub(lambda run: f" {' '.join(map(''.join, pairwise(run[0]))) or run[0]} ", text)


def inverse_document_frequency(counts: np.ndarray, total: int) -> np.ndarray:
    """Return BM25's idf, log(1 + (N − df + ½) / (df + ½)), always above 0."""
    return np.log1p((total - counts + 0.5) / (counts + 0.5))


def checked_language(language: str) -> str:
    """Return a language, or fail with InputError if there is no stemmer for it."""
    if language not in (*LANGUAGES, "none"):
        raise InputError(f"language {language!r}: choose one of {', '.join(LANGUAGES)}, or none")
    return language


@cache
def analyzer(language: str) -> Any:
    """Return tantivy's analyzer for texts from `spelled_out`."""
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.regex(r"\w+"))
    builder = builder.filter(tantivy.Filter.remove_long(LONGEST_WORD)).filter(tantivy.Filter.lowercase())
    return (builder if language == "none" else builder.filter(tantivy.Filter.stemmer(language))).build()


class Passage(NamedTuple):
    """A part of a text: the characters from `start` to before `stop`."""

    start: int
    stop: int


def cut_passages(text: str, tokens: Offsets | np.ndarray, most: int) -> list[Passage]:
    """Cut a text into overlapping passages that cover all of it, in order.

    A passage has at most `most` tokens, unless they belong to one character.

    >>> text = "One fish swims. Two fish swim. Three fish sink. Four fish rest."
    >>> tokens = [match.span() for match in re.finditer("[A-Za-z]+", text)]
    >>> [text[slice(*passage)] for passage in cut_passages(text, tokens, 8)]
    ['One fish swims. Two fish swim. ', 'fish swim. Three fish sink. Four fish rest.']
    """
    places = np.asarray(tokens, dtype=np.int64).reshape(-1, 2)
    if len(places) <= most:
        return [Passage(0, len(text))]
    kinds = _cuts(text, places)
    character = np.append(places[:, 0], len(text))  # where a passage starts that begins with the token
    character[0] = 0
    first, passages = 0, []
    while len(places) - first > most:
        last = max(_cut_between(kinds, first + most - most // LOOK_BACK, first + most, -1), _after(kinds, first))
        passages.append(Passage(int(character[first]), int(character[last])))
        if last == len(places):
            return passages
        earliest, latest = last - most // LOOK_BACK, last - most // OVERLAP
        if len(places) - latest <= most:  # make the last passage as long as allowed: a few words alone say little
            earliest = min(latest, len(places) - most)
        first = max(_cut_between(kinds, earliest, latest, 0), _after(kinds, first))
    return [*passages, Passage(int(character[first]), len(text))]


def _cuts(text: str, places: np.ndarray) -> list[np.ndarray]:
    """List the tokens that a cut may precede: after a sentence, after a blank, all."""
    starts, stops = places[:, 0], places[:, 1]
    apart = np.ones(len(places), dtype=bool)  # for each token: whether all tokens before it end before it begins
    apart[1:] = starts[1:] >= np.maximum.accumulate(stops)[:-1]
    tokens = np.append(np.flatnonzero(apart), len(places))
    ends = ([match.end() for match in kind.finditer(text)] for kind in (SENTENCE_END, re.compile(r"\s+")))
    return [*(np.intersect1d(tokens, np.searchsorted(starts, np.array(each, np.int64))) for each in ends), tokens]


def _cut_between(kinds: list[np.ndarray], low: int, high: int, which: int) -> int:
    """Return the first (0) or last (-1) best cut in a range, else the one before it."""
    for places in kinds:
        between = places[np.searchsorted(places, low) : np.searchsorted(places, high, side="right")]
        if len(between):
            return int(between[which])
    return int(kinds[-1][np.searchsorted(kinds[-1], high, side="right") - 1])


def _after(kinds: list[np.ndarray], token: int) -> int:
    """Return the first cut after a token."""
    return int(kinds[-1][np.searchsorted(kinds[-1], token, side="right")])


class Snippet(NamedTuple):
    """The part of a text to show, with white space as in the document."""

    text: str
    start: int  # in the document
    whole: bool  # whether the snippet is all of the document
    marks: list[Mark]  # where the query's words are in the snippet


class QueryWords:
    """The words of a query to mark in documents; `texts` is the number of documents.

    Function words and single letters are marked only if the query has no other words.
    """

    def __init__(self, query: str, texts: int = 1) -> None:
        words = list(dict.fromkeys(word.casefold() for word in ANY_WORD.findall(query)))
        telling = [word for word in telling_words(words) if len(word) > 1] or words
        self._words = frozenset(telling[:MOST_WORDS])
        self._longest = max(map(len, self._words), default=0) + ENDING
        self._met: set[str] = set()  # words seen in texts, as spelled there
        self._marked: set[str] = set()  # those that match the query
        self._read = min(READ_CHARACTERS, max(PASSAGE_CHARACTERS, READ_IN_ALL // texts))

    def __contains__(self, word: str) -> bool:
        """Return whether a word is one of the query's, with or without an ending."""
        if len(word) > self._longest:
            return False
        word = word.casefold()
        return word in self._words or any(
            word[:-letters] in self._words and word[-letters:].isalpha() for letters in range(1, ENDING + 1)
        )

    def marks_in(self, text: str) -> list[Mark]:
        """Find the query's words in a text."""
        if not self._words:
            return []
        met = set(ANY_WORD.findall(text, 0, self._read))
        self._marked.update(word for word in met - self._met if word in self)
        self._met |= met
        if met.isdisjoint(self._marked):
            return []
        found = (match.span() for match in ANY_WORD.finditer(text, 0, self._read) if match[0] in self._marked)
        return list(islice(found, MOST_MARKS))


def telling_words(words: Sequence[str], language: str = "english") -> Sequence[str]:
    """Drop an English query's function words, unless it has no other words.

    >>> telling_words(["play", "music", "from", "the", "shell"]), telling_words(["to", "be"])
    (['play', 'music', 'shell'], ['to', 'be'])
    """
    if language != "english":
        return words
    return [word for word in words if word.casefold() not in FUNCTION_WORDS] or words


def snippet_of(text: str, passage: Passage | None, words: QueryWords, length: int = SNIPPET_CHARACTERS) -> Snippet:
    """Return the best snippet of the passage that was found, or else of the text."""
    if passage is None:
        return best_snippet(text, words, length)
    found = best_snippet(text[passage.start : passage.stop], words, PASSAGE_CHARACTERS)
    return found._replace(start=passage.start + found.start, whole=len(found.text) == len(text))


def best_snippet(text: str, words: QueryWords, length: int = SNIPPET_CHARACTERS) -> Snippet:
    """Return the snippet with the most distinct words of the query."""
    marks = words.marks_in(text)
    if len(text) <= length:
        return Snippet(text, 0, True, marks)
    start = _best_start(text, marks, length)
    gap = BLANK.search(text, start - 1, start + 40) if start else None
    snippets = [_snippet(text, at, length, marks) for at in (0, gap.end() if gap else start)]
    return max(snippets, key=lambda each: len({each.text[first:last].casefold() for first, last in each.marks}))


def _snippet(text: str, start: int, length: int, marks: Sequence[Mark]) -> Snippet:
    """Cut out about `length` characters, up to the end of the last full word."""
    end = min(start + length, len(text))
    if end < len(text):
        gap = max(text.rfind(" ", end - 40, end), text.rfind("\n", end - 40, end))
        end = gap if gap > 0 else end
    inside = [(first - start, last - start) for first, last in marks if first >= start and last <= end]
    return Snippet(text[start:end], start, False, inside)


def _best_start(text: str, marks: Sequence[Mark], length: int) -> int:
    """Return the start of the first window with the most distinct marked words."""
    best, start, left = 0, 0, 0
    inside: Counter[str] = Counter()  # how often each word is marked in the window, from `left` to `right`
    spelled = [text[first:last].casefold() for first, last in marks]
    # The window grows to the right by one mark at a time, and drops marks on the left that no longer fit.
    for right, (_, last) in enumerate(marks):
        inside[spelled[right]] += 1
        while left <= right and marks[left][0] + length * 3 // 4 < last:
            inside[spelled[left]] -= 1
            inside += Counter()  # drops the words of count 0
            left += 1
        if len(inside) > best:
            best, start = len(inside), marks[left][0]
    return max(0, min(start - length // 4, len(text) - length))


def warn_of_language(corpus: Corpus, encoder: str, language: str = "english") -> None:
    """Warn once if most texts for an English encoder are in another language."""
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
        f"{corpus.name}: most documents seem to be in {found.capitalize()}, and {name} was trained on English: search "
        f"by words works in any language{stem}; for search by meaning take a multilingual encoder, such as "
        f"{MULTILINGUAL_ENCODER}",
    )


def foreign_language(texts: Iterable[str]) -> str | None:
    """Return the language or ISO 639 code of most texts; None if English or unclear.

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
    """Return the code of a text's language; None if unclear."""
    if sum(map(str.isalpha, text)) < LEAST_LETTERS:
        return None
    code, probability = _identifier().classify(text)
    return str(code) if probability >= SURE else None


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # the library's model of 70 MB takes half a second

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
