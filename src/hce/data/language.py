"""Which language texts are in, as far as an encoder that reads English alone has to know, and a line that says so.

Scripts are told by their letters, languages in Latin and Cyrillic letters by their commonest words. Code, numbers and
names have few of those and are taken for no language.
"""

from __future__ import annotations

import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import islice
from typing import NamedTuple

from hce.data.corpus import Corpus
from hce.data.terms import LANGUAGES
from hce.errors import warn_once

logger = logging.getLogger(__name__)

ENGLISH_ENCODERS = ("static", "minilm")
MULTILINGUAL_ENCODER = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"

SAMPLE, BEGINNING = 200, 2000  # documents, and characters of each
MOSTLY = 0.5  # of the letters outside the Latin script
COMMON = 0.08  # of the words: prose in a language has three times as many of its words below
ACCENTED = 0.03  # of the letters: an English text has fewer, and most other languages in Latin letters have more
LEAST_WORDS, LEAST_DISTINCT = 20, 5  # fewer tell nothing; a program may have a variable that is called el or de

WORD = re.compile(r"[^\W\d_]{2,}")
SCRIPTS = {
    "CJK": "Chinese",
    "HIRAGANA": "Japanese",
    "KATAKANA": "Japanese",
    "HANGUL": "Korean",
    "GREEK": "Greek",
    "TAMIL": "Tamil",
    "THAI": "Thai",
}
"""Languages that the first word of a letter's Unicode name tells; a script that several share is named by itself."""

# Without words that are English too (die, in, an), and without those that programs are full of (os, var, end).
COMMON_WORDS = {
    "english": "the of and to in is that for it with was on be by are this from or an not which have at but they has "
    "were been their its you we he his can will would there what when if",
    "german": "der und den von zu das mit sich des auf für ist im dem nicht ein eine auch werden aus nach wird bei "
    "einer um sind noch wie einem über einen zum haben oder durch wurde zur nur vor kann wenn sie ich",
    "french": "de la le et les des est dans une un du en que pour pas qui sur au avec il par ce sont cette aux ou "
    "être nous vous mais leur elle ses ont était ces deux comme même sans aussi sa je ne se",
    "spanish": "de la que el en los se del las un por con una para su al lo más pero sus le ya este sí porque esta "
    "entre cuando muy sobre también hasta hay donde quien desde todo nos durante fue había ser",
    "italian": "di che la il un per una sono della non con del si le da gli nel alla anche dei più come ma delle "
    "questo ha nella degli essere loro stato dal quando molto ed sul suo sua tutto è lo al",
    "portuguese": "de que não uma um em com para se da na por mais dos como mas foi ao ele das tem seu sua ou ser "
    "quando muito há nos já está eu também só pelo pela até isso ela entre depois sem mesmo são",
    "dutch": "de het een van en dat op te zijn met voor niet aan er ook als maar om door bij uit naar dan nog wordt "
    "worden deze hebben geen heeft werd wat kan zich hij wel meer haar",
    "swedish": "och att det som på är av för med den till har inte om ett men jag från så kan när eller ska hon han "
    "nu också efter vid sig där hade alla en",
    "russian": "не на что он как это по но из за то все так его от же было для бы мы вы ее или если при был они меня "
    "еще уже только чтобы после может",
    "arabic": "في من على إلى أن هذا التي الذي عن كان مع هذه لا كما بعد لم كل قد بين وقد",
}
WORDS_OF = {language: frozenset(words.split()) for language, words in COMMON_WORDS.items()}


class Foreign(NamedTuple):
    """A language other than English.

    Attributes:
        name: of the language or its script, as a sentence has it.
        stemmed: what `--language` calls it, where endings can be cut off its words.
    """

    name: str
    stemmed: str | None = None


def foreign_language(texts: Iterable[str]) -> Foreign | None:
    """Tell which language texts are in that are mostly not English; None for English, code, or too little to tell.

    >>> foreign_language(["Die Katze schläft nicht, und der Hund ist auf dem Sofa."] * 2)
    Foreign(name='German', stemmed='german')
    >>> foreign_language(["The cat is not asleep, and the dog is on the sofa."] * 2)
    """
    beginnings = [text[:BEGINNING] for text in texts]
    letters = Counter(char for text in beginnings for char in text if char.isalpha())
    words = Counter(word.lower() for text in beginnings for word in WORD.findall(text))
    total = letters.total()
    others = Counter[str]()
    for char, count in letters.items():
        others[script_of(char)] += count
    latin = others.pop("LATIN", 0)
    if total >= LEAST_WORDS and total - latin > MOSTLY * total:
        return _by_script(others, words)
    accented = sum(count for char, count in letters.items() if not char.isascii())
    return _by_words(words, accented > ACCENTED * total)


@cache
def script_of(letter: str) -> str:
    """Return the first word of a letter's Unicode name, which is its script: LATIN, CJK, CYRILLIC."""
    return unicodedata.name(letter, "unknown").split()[0].split("-")[0]


def _by_script(scripts: Counter[str], words: Counter[str]) -> Foreign:
    """Name the language of a script, or the script where several languages share it and common words do not help."""
    if scripts["HIRAGANA"] + scripts["KATAKANA"] > 0.1 * scripts["CJK"] > 0:
        return Foreign("Japanese")  # Chinese characters beside its own
    script = scripts.most_common(1)[0][0]
    if script in SCRIPTS:
        return _named(SCRIPTS[script])
    return _by_words(words, False) or Foreign(f"in {script.capitalize()} script")


def _by_words(words: Counter[str], is_accented: bool) -> Foreign | None:
    total = words.total()
    if total < LEAST_WORDS:
        return None
    shares = {language: sum(words[word] for word in known) / total for language, known in WORDS_OF.items()}
    english = shares.pop("english")
    best = max(shares, key=lambda language: shares[language])
    distinct = len(WORDS_OF[best] & words.keys())
    if shares[best] >= COMMON and shares[best] > english and distinct >= LEAST_DISTINCT:
        return _named(best.capitalize())
    return Foreign("in another language than English") if is_accented and english < COMMON else None


def _named(name: str) -> Foreign:
    return Foreign(name, name.lower() if name.lower() in LANGUAGES else None)


def warn_of_language(corpus: Corpus, encoder: str, language: str = "english") -> None:
    """Say in one line, once, that a corpus is mostly not in the language that its encoder was trained on.

    Args:
        corpus: the documents; a sample of them is looked at.
        encoder: the name of the encoder, or of what it was trained from.
        language: what `--language` said, where it was asked.
    """
    if encoder.removesuffix(", fitted") not in ENGLISH_ENCODERS:
        return
    foreign = foreign_language(_sample(corpus))
    if foreign is not None:
        warn_once(logger, _notice(corpus.name, foreign, encoder.removesuffix(", fitted"), language))


def _sample(corpus: Corpus) -> Iterable[str]:
    step = max(1, len(corpus) // SAMPLE)
    return (corpus[position].full_text for position in islice(range(0, len(corpus), step), SAMPLE))


def _notice(corpus: str, foreign: Foreign, encoder: str, language: str) -> str:
    stem = f" (index with --language {foreign.stemmed})" if foreign.stemmed not in (None, language) else ""
    if foreign.stemmed is None and language == "english":
        stem = " (index with --language none)"
    return (
        f"{corpus}: most documents seem to be {foreign.name}, and {encoder} was trained on English: words find "
        f"them in any language{stem}; for their meaning take a multilingual encoder, such as {MULTILINGUAL_ENCODER}"
    )
