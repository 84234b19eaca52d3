"""How much words count, by labelled queries: much where words answer them, little where they mislead."""

from __future__ import annotations

import json

import numpy as np

from hce.data.corpus import Corpus
from hce.data.documents import Document
from hce.data.judgments import Judgment, Labels, Qrels, Query
from hce.index.index import Index
from hce.training.heldout import labelled_dev
from hce.training.recipe import Recipe
from hce.training.train import train
from hce.training.words_share import SHARES, best_words_share

CORPUS = Corpus.from_documents(Document(f"d{number}", f"w{number} w{number + 100}") for number in range(40))


class Fixed:
    """An encoder of given vectors; a query is looked up by its first word."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def encode(self, texts, kind="document"):
        return np.stack([self.vectors[int(text.split()[0][1:])] for text in texts])


def dev_of(answers: list[tuple[int, int]]):
    queries = {f"q{word}": Query(f"q{word}", f"w{word}") for word, _ in answers}
    judged = Qrels(Judgment(f"q{word}", f"d{right}", 1) for word, right in answers)
    return labelled_dev(CORPUS, queries, judged, 40, 0)


def vectors_for(answers: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Documents along axes of their own, and for each query the axis of a document."""
    documents = np.eye(40, dtype=np.float32)
    queries = documents.copy()
    for word, right in answers:
        queries[word] = documents[right]
    return documents, queries


def test_words_count_where_they_answer_and_meaning_misleads():
    answers = [(number, number) for number in range(20)]
    documents, queries = vectors_for([(number, (number + 7) % 40) for number in range(20)])
    assert best_words_share(dev_of(answers), Fixed(queries), documents, "english") >= 0.5


def test_words_count_nothing_where_they_mislead():
    answers = [(number, (number + 7) % 40) for number in range(20)]
    documents, queries = vectors_for(answers)
    assert best_words_share(dev_of(answers), Fixed(queries), documents, "english") == SHARES[0]


def test_an_index_takes_over_what_labels_told(concept_corpus, static_encoder, tmp_path):
    queries = {f"q{number}": Query(f"q{number}", concept_corpus[number].text) for number in range(60)}
    labels = Labels(queries, Qrels(Judgment(f"q{number}", concept_corpus[number].id, 1) for number in range(60)))
    recipe = Recipe.for_encoder(static=True, epochs=1, batch_size=32, span_lengths=(4,), fit_static=False)
    result = train(concept_corpus, static_encoder, pairs=labels, recipe=recipe, output=tmp_path / "model")
    assert result.words_share in SHARES
    facts = json.loads((tmp_path / "model" / "hce.json").read_text())
    facts["words_share"] = 0.7
    (tmp_path / "model" / "hce.json").write_text(json.dumps(facts))
    (tmp_path / "model" / "checksums.json").unlink()  # the change is meant
    assert Index.create(tmp_path / "index", concept_corpus, tmp_path / "model").manifest.words_share == 0.7
    index = Index.create(tmp_path / "other", concept_corpus, tmp_path / "model", words_share=0.1)
    assert index.manifest.words_share == 0.1


def test_without_labels_nothing_is_told(concept_corpus, static_encoder):
    recipe = Recipe.for_encoder(static=True, epochs=1, batch_size=32, span_lengths=(4,), fit_static=False)
    assert train(concept_corpus, static_encoder, recipe=recipe).words_share is None
