"""SEAL: the suffix array against brute force, what is written against the language model alone, scores by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import WORDS, word_tokenizer, write_concept_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from hce.data.corpus import Corpus
from hce.data.judgments import Dataset
from hce.errors import InputError
from hce.evaluation.evaluate import evaluate
from hce_lab.comparison import seal
from hce_lab.comparison.bench import compare
from hce_lab.comparison.seal import (
    SHOWN,
    Author,
    SEALSearcher,
    Substrings,
    document_scores,
    query_ngrams,
    weight,
    write_ngrams,
)
from hce_lab.generation.generator import Generator

SEPARATOR = len(WORDS)
documents_strategy = st.lists(st.lists(st.integers(4, 8), max_size=7), min_size=1, max_size=6)


def tiny_generator(kind: str) -> Generator:
    torch.manual_seed(3)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(), pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]"
    )
    size = len(WORDS)
    if kind == "t5":
        config = T5Config(
            vocab_size=size, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
        )
        return Generator(T5ForConditionalGeneration(config), tokenizer, "tiny t5")
    config = GPT2Config(vocab_size=size, n_positions=512, n_embd=16, n_layer=1, n_head=2, initializer_range=0.5)
    return Generator(GPT2LMHeadModel(config), tokenizer, "tiny gpt2")


@pytest.fixture(scope="module", params=["t5", "gpt2"])
def author(request) -> Author:
    """A random language model of either kind."""
    return Author(tiny_generator(request.param))


def all_ngrams(documents: list[list[int]], length: int = 99) -> list[tuple[int, ...]]:
    """Every occurrence of every n-gram, by brute force."""
    return [
        tuple(document[start:end])
        for document in documents
        for start in range(len(document))
        for end in range(start + 1, min(len(document), start + length) + 1)
    ]


# ------------------------------------------------------------------------------------------------ n-grams of the corpus


@settings(max_examples=60, deadline=None)
@given(documents_strategy)
def test_counts_places_and_next_tokens_are_those_of_brute_force(documents):
    substrings = Substrings.of(documents, SEPARATOR)
    occurrences = all_ngrams(documents)
    assert substrings.size == sum(map(len, documents))
    for ngram in {*occurrences, (4, 4, 5), (8, 4), (3,)}:
        span = substrings.find(ngram)
        assert span.occurrences == occurrences.count(ngram)
        found = substrings.places(span)
        assert all(tuple(substrings.tokens[row]) == ngram for row in found)
        holders = [
            number
            for number, document in enumerate(documents)
            for start in range(len(document))
            if tuple(document[start : start + len(ngram)]) == ngram
        ]
        assert sorted(substrings.documents_at(found[:, 0]).tolist()) == holders
    for ngram in {(), *occurrences}:
        following = {longer[-1] for longer in occurrences if longer[:-1] == ngram}
        assert substrings.next_tokens(substrings.find(ngram)).tolist() == sorted(following)


def test_many_different_tokens_are_sorted_too():
    """Numbers of more than one byte and of more than two."""
    rng = np.random.default_rng(0)
    for most in (300, 70_000, 200_000):
        documents = rng.integers(most - 5, most, size=(6, 40)).tolist()
        substrings = Substrings.of(documents, most)
        suffixes = [substrings.tokens[start:].tolist() for start in substrings.suffixes]
        assert all(one < other for one, other in pairwise(suffixes))


def test_a_corpus_without_a_token_has_no_ngram():
    substrings = Substrings.of([[], []], SEPARATOR)
    assert substrings.next_tokens(substrings.everything).tolist() == []
    assert Substrings.of([], SEPARATOR).size == 0


def test_a_corpus_too_large_for_the_suffix_array_is_refused(monkeypatch):
    monkeypatch.setattr(seal, "MAX_TOKENS", 10)
    with pytest.raises(InputError, match="the first 3 documents have 12 tokens, and its suffix array takes 10;"):
        Substrings.of(iter([[4] * 4] * 5), SEPARATOR)


# ------------------------------------------------------------------------------------------------------ what is written


def likelihood(author: Author, query: str, ngram: tuple[int, ...]) -> float:
    """Return log P(n|q), by one pass over everything and no cache."""
    model, tokenizer = author.generator.model, author.generator.tokenizer
    with torch.inference_mode():
        if author.generator.is_seq2seq:
            features = tokenizer(query, return_tensors="pt")
            given = {"decoder_input_ids": torch.tensor([[0, *ngram[:-1]]]), "input_ids": features["input_ids"]}
        else:
            prompt = tokenizer(f"{SHOWN}Query: {query}\nPassage:")["input_ids"]
            given = {"input_ids": torch.tensor([[*prompt, *ngram[:-1]]])}
        scores = model(**given).logits[0, -len(ngram) :].log_softmax(-1)
    return sum(float(scores[place, token]) for place, token in enumerate(ngram))


@settings(max_examples=15, deadline=None)
@given(documents_strategy.filter(any), st.lists(st.sampled_from([*WORDS[4:9], "w150"]), min_size=1, max_size=4))
def test_only_ngrams_of_the_corpus_are_written(author, documents, words):
    substrings, query = Substrings.of(documents, SEPARATOR), " ".join(words)
    written = write_ngrams(author, substrings, query, beams=3, length=4)
    assert written
    assert set(written) <= set(all_ngrams(documents, 4))
    some = list(written)[:: max(1, len(written) // 4)]
    for ngram in some:
        assert written[ngram] == pytest.approx(likelihood(author, query, ngram), abs=1e-3)


def test_the_likeliest_are_written(author):
    """With room for all, everything that the corpus has; with less, the best of each length that can be reached."""
    documents = np.random.default_rng(1).integers(4, 9, size=(4, 6)).tolist()
    substrings = Substrings.of(documents, SEPARATOR)
    everything = write_ngrams(author, substrings, "w150", beams=200, length=3)
    assert set(everything) == set(all_ngrams(documents, 3))
    few = write_ngrams(author, substrings, "w150", beams=2, length=3)
    beam: list[tuple[int, ...]] = [()]
    for size in (1, 2, 3):
        longer = [ngram for ngram in everything if len(ngram) == size and ngram[:-1] in beam]
        beam = sorted(longer, key=everything.__getitem__, reverse=True)[:2]
        assert {ngram for ngram in few if len(ngram) == size} == set(beam)


def test_the_query_own_ngrams_are_scored_where_the_corpus_has_them(author):
    tokens = dict(zip(WORDS, range(len(WORDS)), strict=True))
    star, red, law = tokens["star"], tokens["red"], tokens["law"]
    assert list(query_ngrams(author, "star red law ship")) == [
        (star, red, law),
        (red, law, tokens["ship"]),
        (law, tokens["ship"]),
        (tokens["ship"],),
    ]
    many = np.random.default_rng(2).integers(20, 120, size=(30, 20)).tolist()
    substrings = Substrings.of([[star, red], [law], *many], SEPARATOR)
    written = write_ngrams(author, substrings, "star red law", beams=1, length=3)
    assert {(star,), (star, red), (red,), (law,)} <= set(written)
    assert (red, law) not in written
    assert written[star, red] == pytest.approx(likelihood(author, "star red law", (star, red)), abs=1e-3)


# --------------------------------------------------------------------------------------------- how documents are scored


def test_weights_by_hand():
    assert weight(math.log(0.5), 1, 5) == pytest.approx(math.log(4))  # odds 1 by the model, 1/4 by the corpus
    assert weight(math.log(0.9), 2, 8) == pytest.approx(math.log(27))  # odds 9 and 1/3
    assert weight(math.log(0.2), 1, 5) == pytest.approx(0, abs=1e-12)
    assert weight(math.log(0.1), 1, 5) == 0  # less likely than in the corpus: no evidence at all
    assert 20 < weight(0.0, 1, 5) < 30  # certain, and yet finite


def test_scores_by_hand():
    documents = [[4, 5, 6], [4, 5, 9], [4, 5, 7, 5, 8], [9]]
    substrings = Substrings.of(documents, SEPARATOR)
    weights = {(4, 5): 3.0, (5, 6): 2.0, (5, 8): 2.0, (9,): 1.0, (7,): 0.0}
    scores = document_scores(substrings, weights)
    np.testing.assert_allclose(
        scores,
        [
            9,  # (5, 6) overlaps what weighs more
            9 + 1,
            9 + 4 * (0.2 + 0.8 * 0.5),  # of (5, 8), only 8 is new
            1,
        ],
    )
    np.testing.assert_allclose(document_scores(substrings, weights, alpha=1, beta=1), [3, 4, 3 + 2 * 0.5, 1])


def plain_score(document: list[int], weights: dict[tuple[int, ...], float]) -> float:
    """W(d, q), word for word."""
    score, blocked, tokens = 0.0, set(), set()
    for ngram, value in sorted(weights.items(), key=lambda item: (-item[1], item[0])):
        starts = [s for s in range(len(document)) if tuple(document[s : s + len(ngram)]) == ngram]
        places = [set(range(start, start + len(ngram))) for start in starts]
        if value > 0 and any(not place & blocked for place in places):
            score += value**2 * (0.2 + 0.8 * len(set(ngram) - tokens) / len(set(ngram)))
            tokens |= set(ngram)
            blocked |= set().union(*places)
    return score


@settings(max_examples=60, deadline=None)
@given(documents_strategy.filter(any), st.data())
def test_scores_are_those_of_the_definition(documents, data):
    ngrams = st.sampled_from(sorted(set(all_ngrams(documents, 3))))
    weights = data.draw(st.dictionaries(ngrams, st.floats(0, 9), max_size=8))
    scores = document_scores(Substrings.of(documents, SEPARATOR), weights)
    np.testing.assert_allclose(scores, [plain_score(document, weights) for document in documents], rtol=1e-9)


# ----------------------------------------------------------------------------------------------------- the whole system


def learn(generator: Generator, pairs: list[tuple[str, str]]) -> None:
    """Teach a seq2seq model to write an n-gram for each query, by heart."""
    tokenizer, model = generator.tokenizer, generator.model
    queries = tokenizer([query for query, _ in pairs], return_tensors="pt", padding=True)
    targets = tokenizer([ngram for _, ngram in pairs], return_tensors="pt", padding=True)["input_ids"]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        optimizer.zero_grad()
        model(**queries, labels=targets).loss.backward()
        optimizer.step()


def test_a_language_model_that_knows_the_ngrams_finds_their_documents(concept_corpus):
    """The queries' words are in no document, so that nothing but what was learnt leads to them."""
    corpus = Corpus.from_documents(list(concept_corpus)[:40])
    names = [f"star {one} {other}" for one in WORDS[5:11] for other in WORDS[5:12]][:40]
    generator = tiny_generator("t5")
    before = SEALSearcher.index(Author(generator), corpus).search(names, 1)
    learn(
        generator, [(name, " ".join(document.text.split()[3:7])) for name, document in zip(names, corpus, strict=True)]
    )
    after = SEALSearcher.index(Author(generator), corpus).search(names, 1)
    right = [[hits[0].id == name for hits, name in zip(found, corpus.ids, strict=True)] for found in (before, after)]
    assert np.mean(right[0]) < 0.2
    assert np.mean(right[1]) > 0.9


def test_a_query_without_words_finds_nothing(author, concept_corpus):
    searcher = SEALSearcher.index(author, Corpus.from_documents(list(concept_corpus)[:5]))
    assert searcher.search(["", " \n"], 3) == [[], []]
    (hits,) = searcher.search(["w1 w2"], 3)
    assert 1 <= len(hits) <= 3
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_a_model_without_a_decoder_is_refused(bert_folder):
    with pytest.raises(InputError, match=r"seal: .* has no decoder; give a causal or seq2seq language model"):
        Author(Generator.load(str(bert_folder.parent / "base"), device="cpu"))


def test_a_model_that_reads_too_little_is_refused():
    generator = tiny_generator("gpt2")
    generator.model.config.n_positions = 200
    with pytest.raises(InputError, match=r"seal: tiny gpt2 reads 200 tokens, and a prompt takes \d+;"):
        Author(generator)


def test_hce_compare_knows_seal(tmp_path, concept_corpus, module_static_encoder):
    model = tmp_path / "model"
    generator = tiny_generator("gpt2")
    generator.model.save_pretrained(model)
    generator.tokenizer.save_pretrained(model)
    module_static_encoder.save(tmp_path / "encoder")
    data = write_concept_dataset(tmp_path / "data", concept_corpus, {"test": 4})

    def run():
        return compare(
            *(data, tmp_path / "results", ["seal"]),
            encoder=str(tmp_path / "encoder"),
            language_model=str(model),
            progress=True,
        )

    (result,) = run().results
    by_hand = evaluate(SEALSearcher.index(Author(generator), concept_corpus), *Dataset.load(data, "test").labels)
    assert result.per_query["nDCG@10"] == by_hand.per_query["nDCG@10"]
    assert result.facts["language_model"] == str(model)
    assert result.facts["tokens"] == sum(len(document.full_text.split()) for document in concept_corpus)
    assert result.index_bytes > 0
    kept = set((tmp_path / "results" / "results").iterdir())
    run()
    assert set((tmp_path / "results" / "results").iterdir()) == kept
    generator.model.transformer.wte.weight.data.mul_(2)
    generator.model.save_pretrained(model)
    run()
    assert len(set((tmp_path / "results" / "results").iterdir())) == 2  # another language model, another result
