"""Dev measures: right by hand and against ir_measures, and made of what training never sees."""

from __future__ import annotations

import numpy as np
import pytest

from hce.data.corpus import Corpus
from hce.data.judgments import Judgment, Qrels, Query
from hce.data.text import Document
from hce.errors import InputError
from hce.evaluation.evaluate import DenseSearcher, evaluate
from hce.training.pairs import DevQueries, DevSet, _ndcg, labeled_devset, pseudo_devset


def test_labeled_measure_is_ndcg(static_encoder, planted_corpus):
    """The same figure as ir_measures gives for binary judgments over the whole corpus."""
    queries = {str(i): Query(str(i), planted_corpus[i].text[:12]) for i in range(0, 240, 7)}
    judged = Qrels(
        Judgment(name, planted_corpus[int(name) + step].id, 1)
        for name in queries
        for step in range(1 + int(name) % 3)
        if int(name) + step < 240
    )
    dev = labeled_devset(planted_corpus, queries, judged, pool_size=240, seed=0)
    vectors = static_encoder.encode(list(planted_corpus.texts()))
    expected = evaluate(DenseSearcher(static_encoder, planted_corpus.ids, vectors), queries, judged, ["nDCG@10"])
    assert dev.measure(static_encoder)["labeled"] == pytest.approx(expected.means["nDCG@10"], abs=1e-6)
    assert dev.measure(static_encoder, vectors) == dev.measure(static_encoder)


class FixedEncoder:
    """Knows the vectors of a few texts."""

    def encode(self, texts, kind="document"):
        known = {"q": [1, 0], "own": [0.8, 0.6], "better": [1, 0], "worse": [0, 1], "whole": [1, 0]}
        return np.array([known[text] for text in texts], dtype=np.float32)


def test_the_variant_stands_in_for_the_document_by_hand():
    encoder = FixedEncoder()
    # The document's whole text would win; cut, it scores 0.8 and one other is better: rank 2, so 1/log2(3).
    pool = encoder.encode(["whole", "better", "worse"])
    queries = DevQueries("spans", ["q"], [np.array([0])], ["own"])
    query_vectors, variant_vectors = encoder.encode(queries.texts, "query"), encoder.encode(queries.variants)
    assert _ndcg(pool, queries, query_vectors, variant_vectors) == pytest.approx(1 / np.log2(3))
    assert _ndcg(pool[[0, 2]], queries, query_vectors, variant_vectors) == 1.0


def stories(count: int) -> Corpus:
    return Corpus.from_documents(
        Document(
            f"d{i}",
            f"star w{i} begins the story of w{i}. " + " ".join(f"w{(i * j) % 190}" for j in range(1, 60)),
            title=f"w{i} star",
        )
        for i in range(count)
    )


def test_panel_has_four_kinds_cut_out_of_their_documents():
    corpus = stories(60)
    held_out = np.arange(0, 60, 2)
    dev = pseudo_devset(corpus, held_out, pool_size=50, seed=0)
    assert [queries.kind for queries in dev.panel] == ["titles", "first sentences", "short spans", "long spans"]
    assert len(dev.pool) == 50
    assert set(held_out) <= set(dev.pool.tolist())
    for queries in dev.panel:
        for text, variant, (place,) in zip(queries.texts, queries.variants, queries.answers, strict=True):
            source = corpus[int(dev.pool[place])]
            assert text in source.full_text
            assert len(variant) < len(source.full_text)


def test_documents_without_titles_have_no_title_kind():
    corpus = Corpus.from_documents(Document(f"d{i}", " ".join(f"w{i + j}" for j in range(50))) for i in range(40))
    kinds = [queries.kind for queries in pseudo_devset(corpus, np.arange(30), pool_size=40, seed=0).panel]
    assert kinds == ["short spans", "long spans"]


def test_one_word_documents_cannot_be_measured():
    corpus = Corpus.from_documents(Document(f"d{i}", f"w{i}") for i in range(40))
    with pytest.raises(InputError, match="too short to make held-out queries"):
        pseudo_devset(corpus, np.arange(30), pool_size=40, seed=0)


def test_no_answer_in_the_corpus_is_one_line(planted_corpus):
    with pytest.raises(InputError, match="no dev query has a relevant document"):
        labeled_devset(planted_corpus, {"a": Query("a", "x")}, Qrels([Judgment("a", "gone", 1)]), 10, 0)


def test_a_better_encoder_measures_better(static_encoder, planted_corpus):
    dev = pseudo_devset(planted_corpus, np.arange(0, 240, 3), pool_size=240, seed=0)
    assert isinstance(dev, DevSet)
    fitted = static_encoder.fitted_to(planted_corpus)
    noise = np.random.default_rng(0)
    blind = static_encoder.fitted_to(planted_corpus)
    weight = blind.model[0].embedding.weight
    weight.data += weight.new_tensor(noise.normal(size=tuple(weight.shape)) * 3)
    assert np.mean(list(dev.measure(fitted).values())) > np.mean(list(dev.measure(blind).values()))
