"""Words: BM25 by tantivy against bm25s, languages and scripts, additions and removals, filters, snapshots."""

from __future__ import annotations

import bm25s
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hce.data.text import QueryWords, analyzer, spelled_out, terms
from hce.errors import FormatError, HceError, InputError
from hce.search import words as words_module
from hce.search.words import PassageText, Words

TEXTS = ["red shoes for running", "blue hats", "a red hat and a blue coat", "shoes, shoes and more shoes", "nothing"]


def numbers_of(words: Words, query: str, k: int = 10, **options) -> list[int]:
    return words.search(query, k, **options).numbers.tolist()


def of(texts: list[str], language: str = "english", first: int = 1) -> Words:
    words = Words.new(language)
    words.add(enumerate(texts, start=first))
    return words


def test_words_are_found_in_any_form():
    words = of(TEXTS)
    assert numbers_of(words, "shoe") == [4, 1]
    assert numbers_of(words, "HATS") == [2, 3]
    assert numbers_of(words, "socks") == []
    assert numbers_of(words, "?!") == []
    assert set(numbers_of(words, "red runners hat")) == {1, 2, 3}


def test_scores_are_those_of_bm25():
    """Lucene's formula with tantivy's k1 = 1.2; lengths up to 40 words are exact in tantivy's one byte."""
    words = of(TEXTS, "none")
    rival = bm25s.BM25(method="lucene", k1=1.2, b=0.75)
    rival.index(bm25s.tokenize(TEXTS, stopwords=None, token_pattern=r"\w+", show_progress=False), show_progress=False)
    for query in ("red", "shoes hat", "a red red hat"):
        # tantivy leaves the factor k1 + 1 in, Lucene leaves it out.
        expected = 2.2 * rival.get_scores(query.split())
        found, scores = words.among(query, np.arange(1, 6)), np.zeros(5)
        scores[found.numbers - 1] = found.scores
        np.testing.assert_allclose(scores, expected, rtol=1e-5)


def test_ties_go_by_number_however_many_there_are():
    words = Words.new()
    words.add((number, "red hat") for number in range(30, 0, -1))
    assert numbers_of(words, "hat", 3) == [1, 2, 3]
    assert numbers_of(words, "hat", 2, allowed=np.array([17, 25, 29])) == [17, 25]
    words.add([(31, "a hat, a hat, and a coat of felt")], [PassageText(31, 1, "hat hat")])
    assert numbers_of(words, "hat", 3) == [31, 1, 2]


@settings(max_examples=25, deadline=None)
@given(
    batches=st.lists(st.lists(st.sampled_from(["red", "red hat", "hat hat"]), min_size=20, max_size=40), max_size=3),
    k=st.integers(1, 12),
    seed=st.integers(0, 9),
)
def test_the_first_k_are_the_first_of_all(batches, k, seed):
    words, numbers = Words.new(), np.random.default_rng(seed).permutation(120).tolist()
    for batch in batches:
        words.add([(numbers.pop(), text) for text in batch])
    for query in ("red", "hat", "red hat"):
        for first, of_all in zip(words.search(query, k), words.search(query, 1000), strict=True):
            np.testing.assert_array_equal(first, of_all[:k])


def test_scores_of_given_documents_are_those_of_the_search():
    words = of(TEXTS)
    found = words.search("red shoes hat", 10)
    for ours, theirs in zip(words.among("red shoes hat", found.numbers), found, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert words.among("red", np.array([5, 1])).numbers.tolist() == [1]
    assert len(words.among("red", np.empty(0, np.int64)).numbers) == 0


@pytest.mark.parametrize(
    ("text", "query", "language"),
    [
        ("東京都の天気は晴れです", "天気", "english"),
        ("我喜欢在北京的公园里散步", "北京公园", "english"),
        ("def getUserName(self): ...", "user name", "english"),
        ("the HTTPServer class", "http server", "english"),
        ("call parse_url on it", "url parsing", "english"),
        ("call parse_url on it", "parse_url", "english"),
        ("die Häuser der Stadt", "Haus", "german"),
        ("les maisons du village", "maison", "french"),
        ("Привет, мир!", "мир", "none"),
        ("café au lait", "CAFÉ", "english"),
        ("version 3.11 of Python", "3.11", "english"),
        ("cafe\u0301 au lait", "caf\u00e9", "english"),  # é as two characters, and as one
        ("caf\u00e9 au lait", "cafe\u0301", "english"),
        ("the \ufb01le in the o\ufb03ce", "office files", "english"),  # ligatures, as in a PDF
        ("ＡＢＣ １２３", "abc 123", "none"),
        ("Word™ of 10⁶", "word", "none"),
        ("தமிழ் மொழி", "மொழி", "tamil"),
        ("हिन्दी भाषा", "हिन्दी", "none"),
    ],
)
def test_scripts_languages_and_identifiers(text, query, language):
    words = of([text, "something else entirely 999"], language)
    assert numbers_of(words, query)[0] == 1


@pytest.mark.parametrize(("text", "query"), [("தமிழ் மொழி", "மொழி"), ("हिन्दी भाषा", "हिन्दी"), ("red hat", "hat")])
def test_matched_words_are_whole_in_any_script(text, query):
    assert of([text, "something else"], "none").matched(query, [1]) == [(query,)]
    assert [text[slice(*mark)] for mark in QueryWords(query).marks_in(text)] == [query]


def test_a_compound_is_a_word_like_any_other():
    """Its parts are left to the dense side: tantivy splits compounds only by a list of their parts."""
    words = of(["Die Donaudampfschifffahrt begann 1829.", "Ein Dampfschiff"], "german")
    assert numbers_of(words, "Donaudampfschifffahrten") == [1]


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("aB_ c,.1東京हिกाéİß\n\t-'"), max_size=30) | st.text(max_size=20))
def test_the_terms_of_a_text_are_those_that_tantivy_finds_in_all_of_it(text):
    assert terms(text, "english") == list(analyzer("english").analyze(spelled_out(text)))


def test_spelled_out_leaves_plain_text_alone():
    assert spelled_out("A plain sentence, with marks.") == "A plain sentence, with marks."


def test_an_unknown_language_is_refused():
    with pytest.raises(InputError, match="language 'klingon': choose one of arabic, "):
        of(TEXTS, "klingon")


def test_filters_are_exact_however_far_down():
    words = of(["common word"] * 300 + ["common word rare"])
    assert numbers_of(words, "common rare", 2, allowed=np.array([7, 250, 299])) == [7, 250]
    assert numbers_of(words, "common rare", 5, allowed=np.array([299])) == [299]
    assert numbers_of(words, "common", 3) == [1, 2, 3]  # ties in order of number


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=12))
def test_changes_are_seen_as_if_built_anew(changes):
    words, present = of(TEXTS), dict(enumerate(TEXTS, start=1))
    for is_addition, pick in changes:
        if is_addition:
            number = 10 + len(present) + 100 * pick + sum(present)
            words.add([(number, TEXTS[pick])])
            present[number] = TEXTS[pick]
        elif present:
            gone = list(present)[pick % len(present)]
            words.remove(np.array([gone]))
            del present[gone]
    assert len(words) == len(present)
    for query in ("red", "shoes", "hat coat"):
        anew = Words.new()
        anew.add(present.items())
        expected = anew.search(query, 50).numbers
        assert sorted(words.search(query, 50).numbers) == sorted(expected)


def test_a_snapshot_is_read_and_never_changed(tmp_path):
    of(TEXTS).save(tmp_path)
    before = contents(tmp_path)
    words = Words.load(tmp_path, "english")
    words.add([(9, "red socks")])
    words.remove(np.array([1]))
    assert set(numbers_of(words, "red")) == {3, 9}
    assert set(numbers_of(Words.load(tmp_path, "english"), "red")) == {1, 3}
    assert contents(tmp_path) == before


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


def test_a_damaged_snapshot_is_told(tmp_path):
    with pytest.raises(FormatError, match="the index of words is damaged"):
        Words.load(tmp_path, "english")
    of(TEXTS).save(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(FormatError, match="the index of words is damaged"):
        Words.load(tmp_path, "english")


# ------------------------------------------------------------------------------------------------- passages

PASSAGES = [
    PassageText(2, 11, "blue hats and a zebra"),
    PassageText(2, 12, "hats of red"),
    PassageText(4, 13, "shoes"),
]


def with_passages() -> Words:
    words = Words.new()
    words.add(enumerate(TEXTS, start=1), PASSAGES)
    return words


def test_a_writer_that_ended_is_no_bug(monkeypatch):
    """As tantivy's does without memory or disk space; any other error passes through."""
    words = Words.new()

    def ends(message):
        def entry(*parts):
            raise ValueError(message)

        monkeypatch.setattr(words_module, "_entry", entry)

    ends("The index writer was killed. It can happen if an indexing worker encountered an Io error for instance.")
    with pytest.raises(HceError, match="memory or disk space ran out"):
        words.add([(1, "a text")])
    ends("another error")
    with pytest.raises(ValueError, match="another error"):
        words.add([(1, "a text")])


def test_a_document_is_found_once_by_its_best_passage(tmp_path):
    with_passages().save(tmp_path)
    for words in (with_passages(), Words.load(tmp_path, "english")):
        assert len(words) == 5
        found = words.search("zebra", 10)
        assert (found.numbers.tolist(), found.passage_numbers.tolist()) == ([2], [11])
        found = words.search("red hats shoes", 10)
        assert sorted(found.numbers.tolist()) == [1, 2, 3, 4]
        assert dict(zip(found.numbers.tolist(), found.passage_numbers.tolist(), strict=True)) == {
            1: 0,
            2: 12,
            3: 0,
            4: 0,
        }
        again = words.among("red hats shoes", np.array([4, 2, 5]))
        known = dict(zip(found.numbers.tolist(), found.scores.tolist(), strict=True))
        assert dict(zip(again.numbers.tolist(), again.scores.tolist(), strict=True)) == {n: known[n] for n in (2, 4)}


def test_passages_of_one_document_do_not_crowd_out_others():
    words = of(TEXTS)
    words.add([(9, "zebra " * 50)], [PassageText(9, place, "red zebra") for place in range(1, 300)])
    assert numbers_of(words, "red zebra", 3)[0] == 9
    assert set(numbers_of(words, "red zebra", 3)) == {9, 1, 3}
    assert set(numbers_of(words, "red", 5, allowed=np.array([1, 3]))) == {1, 3}
    words.remove(np.array([9]))
    assert len(words) == 5
    assert numbers_of(words, "zebra") == []
    np.testing.assert_array_equal(words.search("red hat", 5).scores, of(TEXTS).search("red hat", 5).scores)


def test_shared_words_are_told_of_short_texts_and_of_long_ones():
    words = with_passages()
    short = words.matched("Red ZEBRAS hat", [2, 3], {2: TEXTS[1], 3: TEXTS[2]})
    assert short == words.matched("Red ZEBRAS hat", [2, 3]) == [("hat",), ("Red", "hat")]
