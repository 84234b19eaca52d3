"""The rivals: each against an independent formulation, and all behind the same interface."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from conftest import labels_of_concepts, real_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

import hce
from hce.data.corpus import Corpus
from hce.data.judgments import Dataset, Judgment, Labels, Qrels, Query
from hce.data.text import WORD_OR_MARK, Document
from hce.encoding.encoder import Encoder
from hce.errors import InputError
from hce.evaluation.evaluate import DenseSearcher, evaluate
from hce.evaluation.runs import Scored
from hce.training.co_training import TrainingRun
from hce.training.pairs import LabeledPairs, LabelSets, batch_count, sources_and_devset
from hce.training.recipe import Recipe
from hce_lab.comparison import tsdae
from hce_lab.comparison.bm25 import K1, B, BM25Searcher, ReciprocalRanks, expanded_texts, fused_by_rank
from hce_lab.comparison.pefa import LAMBDAS, NeighbourSearcher, averaged
from hce_lab.comparison.systems import DEFAULT, SYSTEMS, WITHOUT_TREE, choose, trained
from hce_lab.comparison.tas_b import TopicBatches, by_topic
from hce_lab.comparison.task import Task
from hce_lab.comparison.tsdae import damaged, denoise

SMALL = Recipe(
    train="encoder", epochs=2, epoch_pairs=128, batch_size=32, span_lengths=(4,), dev_queries=24, learning_rate=0.05
)


@pytest.fixture(scope="module")
def labels() -> Labels:
    return labels_of_concepts(80)


def as_generated(labels: Labels) -> Labels:
    """The same queries under other ids."""
    queries = {f"g-{name}": Query(f"g-{name}", query.text) for name, query in labels.queries.items()}
    return Labels(queries, Qrels([each._replace(query_id=f"g-{each.query_id}") for each in labels.qrels.judgments()]))


@pytest.fixture(scope="module")
def task(concept_corpus, labels, module_static_encoder, tmp_path_factory) -> Task:
    folder = tmp_path_factory.mktemp("encoder") / "static"
    module_static_encoder.save(folder)
    names = list(labels.qrels)
    return Task(
        *(concept_corpus, str(folder), SMALL),
        *(labels.only(names[:50]), labels.only(names[50:]), as_generated(labels.only(names[:20]))),
    )


# --------------------------------------------------------------------------------------------------------------- BM25


def lucene_bm25(texts: list[str], query: str) -> list[float]:
    """BM25 as Lucene's documentation has it, word by word."""
    words = [text.split() for text in texts]
    mean = sum(map(len, words)) / len(words)
    scores = []
    for document in words:
        counts = Counter(document)
        score = 0.0
        for word in query.split():
            df = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - df + 0.5) / (df + 0.5))
            score += idf * counts[word] / (counts[word] + K1 * (1 - B + B * len(document) / mean))
        scores.append(score)
    return scores


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["xq", "zk", "mj", "vp", "hw"]), min_size=1, max_size=8), min_size=2, max_size=8)
)
def test_bm25_is_the_formula(documents):
    """The words are their own stems, so only the formula is at stake."""
    texts = [" ".join(words) for words in documents]
    ids = [f"d{i}" for i in range(len(texts))]
    (hits,) = BM25Searcher.index(ids, texts).search(["xq zk"], 10)
    expected = lucene_bm25(texts, "xq zk")
    assert {hit.id: pytest.approx(hit.score, rel=1e-5) for hit in hits} == {
        name: score for name, score in zip(ids, expected, strict=True) if score > 0
    }
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_bm25_matches_stems_and_finds_nothing_by_unknown_words():
    searcher = BM25Searcher.index(["a", "b", "c"], ["running cats", "a cat RUNS here", "nothing of it"])
    found = searcher.search(["cats run", "zebra", "", "?"], 2)
    assert {hit.id for hit in found[0]} == {"a", "b"}
    assert found[1:] == [[], [], []]
    assert searcher.nbytes > 0


def test_bm25_keeps_equal_documents_in_order():
    searcher = BM25Searcher.index(["z", "a", "m"], ["one word"] * 3)
    assert [hit.id for hit in searcher.search(["word"], 2)[0]] == ["z", "a"]


def test_generated_queries_lead_bm25_to_their_document():
    corpus = Corpus.from_documents([Document("a", "cats"), Document("b", "dogs")])
    generated = Labels({"g": Query("g", "feline pets")}, Qrels([Judgment("g", "a", 1)]))
    texts = list(expanded_texts(corpus, generated))
    assert texts == ["cats feline pets", "dogs"]
    assert [hit.id for hit in BM25Searcher.index(corpus.ids, texts).search(["feline"], 5)[0]] == ["a"]


@pytest.mark.parametrize(("name", "expected"), [("scifact", 0.6873), ("nfcorpus", 0.3251)])
def test_bm25_scores_what_is_published(name, expected):
    """Published with other stop words and stems: .665 to .679 on scifact, .31 to .325 on nfcorpus."""
    corpus, queries, qrels = Dataset.load(real_dataset(name))
    report = evaluate(BM25Searcher.index(corpus.ids, corpus.texts()), queries, qrels, ["nDCG@10"])
    assert report.means["nDCG@10"] == pytest.approx(expected, abs=0.002)


class AlwaysTheSame:
    """A searcher that always finds the same."""

    def __init__(self, *ids: str) -> None:
        self.ids = ids

    def search(self, queries, k):
        return [[Scored(each, 1.0) for each in self.ids[:k]] for _ in queries]


def test_sums_of_reciprocal_ranks_by_hand():
    fused = fused_by_rank([[Scored("a", 3), Scored("b", 2), Scored("c", 1)], [Scored("c", 9), Scored("d", 8)]])
    assert [hit.id for hit in fused] == ["c", "a", "b", "d"]  # b and d tie at 1/62
    assert [hit.score for hit in fused] == pytest.approx([1 / 63 + 1 / 61, 1 / 61, 1 / 62, 1 / 62])


def test_a_document_that_both_find_is_ahead_of_what_one_finds_first():
    found = ReciprocalRanks((AlwaysTheSame("a", "b"), AlwaysTheSame("c", "b"))).search(["x", "y"], 2)
    assert [[hit.id for hit in hits] for hits in found] == [["b", "a"], ["b", "a"]]


# --------------------------------------------------------------------------------------------------------------- PEFA


class Fixed:
    """An encoder that knows its vectors."""

    def __init__(self, vectors: dict[str, list[float]]) -> None:
        self.vectors = vectors

    def encode(self, texts, side="document"):
        return np.array([self.vectors[text] for text in texts], dtype=np.float32)


def test_pefa_xl_by_hand(monkeypatch):
    """Two documents, two known queries, the second answered by the document that is farther from q."""
    documents = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    queries = np.array([[1.0, 0.0], [0.6, 0.8]], dtype=np.float32)
    answers = [np.array([0]), np.array([0, 1])]
    searcher = NeighbourSearcher(Fixed({"q": [0.8, 0.6]}), ["a", "b"], documents, queries, answers, mix=0.5)
    asked = np.array([[0.8, 0.6]], dtype=np.float32)
    scores = searcher.mixed(asked, asked @ documents.T)
    # q·x is 0.8 and 0.96, both neighbours count, divided by their number
    np.testing.assert_allclose(scores, [[0.5 * 0.8 + 0.5 * (0.8 + 0.96) / 2, 0.5 * 0.6 + 0.5 * 0.96 / 2]], rtol=1e-6)
    assert [hit.id for hit in searcher.search(["q"], 1)[0]] == ["a"]
    monkeypatch.setattr("hce_lab.comparison.pefa.NEIGHBOURS", 1)
    scores = searcher.mixed(asked, asked @ documents.T)  # the nearest alone, which both documents answer
    np.testing.assert_allclose(scores, [[0.5 * 0.8 + 0.5 * 0.96, 0.5 * 0.6 + 0.5 * 0.96]], rtol=1e-6)


def test_pefa_xs_by_hand():
    documents = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    queries = np.array([[0.6, 0.8], [0.6, -0.8]], dtype=np.float32)
    moved = averaged(documents, queries, [np.array([0]), np.array([0])], mix=0.25)
    np.testing.assert_allclose(moved[0], [1.0, 0.0], atol=1e-6)  # (1 + 0.6 + 0.6, 0.8 − 0.8), to unit length
    np.testing.assert_allclose(moved[1], [0.0, 1.0], atol=1e-6)  # nobody asked for it: it stays where it is
    moved = averaged(documents, queries[:1], [np.array([1])], mix=0.25)
    direction = np.array([0.6, 1.8]) / math.hypot(0.6, 1.8)
    np.testing.assert_allclose(moved[1], 0.25 * documents[1] + 0.75 * direction, rtol=1e-6)


def test_pefa_without_neighbours_is_the_encoder(module_static_encoder, concept_corpus):
    """λ = 1 leaves q·d alone: both forms then rank as the encoder does."""
    vectors = module_static_encoder.encode(list(concept_corpus.texts()))
    known = module_static_encoder.encode(["w1 w2", "w50"], "query")
    answers = [np.array([3]), np.array([5])]
    plain = DenseSearcher(module_static_encoder, concept_corpus.ids, vectors)
    extra = NeighbourSearcher(module_static_encoder, concept_corpus.ids, vectors, known, answers, mix=1.0)
    small = DenseSearcher(module_static_encoder, concept_corpus.ids, averaged(vectors, known, answers, 1.0))
    for query in (["w1 w77"], ["w50 w51 w3"]):
        expected = [hit.id for hit in plain.search(query, 20)[0]]
        assert [hit.id for hit in extra.search(query, 20)[0]] == expected
        assert [hit.id for hit in small.search(query, 20)[0]] == expected


# ---------------------------------------------------------------------------------------------------- as it was given


def test_an_encoder_that_says_so_is_scored_by_inner_products(concept_corpus, bert_folder, tmp_path):
    """Contriever's vectors have lengths that mean something; ours are unit vectors everywhere else."""
    model = SentenceTransformer(str(bert_folder), device="cpu")
    model.similarity_fn_name = "dot"
    model.save(str(tmp_path / "dot"), create_model_card=False)
    queries = [concept_corpus[position].text for position in range(5)]
    texts = list(concept_corpus.texts())
    Encoder.load(tmp_path / "dot", device="cpu").save(
        tmp_path / "ours"
    )  # with the Normalize that makes its vectors ours
    for folder, by_lengths in ((tmp_path / "dot", True), (tmp_path / "ours", False), (bert_folder, False)):
        built = SYSTEMS["untrained"].build(Task(concept_corpus, str(folder), Recipe()))
        one, other = model.encode(queries), model.encode(texts)
        if not by_lengths:
            one, other = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (one, other))
        expected = np.sort(one @ other.T, axis=1)[:, ::-1][:, :3]
        found = [[hit.score for hit in hits] for hits in built.searcher.search(queries, 3)]
        np.testing.assert_allclose(found, expected, rtol=1e-4)


# -------------------------------------------------------------------------------------------------------------- TAS-B


@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 30), turn=st.integers(0, 3), seed=st.integers(0, 9))
def test_topic_batches_are_of_one_topic(concept_corpus, labels, size, turn, seed):
    pairs = LabeledPairs(concept_corpus, *labels)
    topics = np.arange(80) % 4
    source = TopicBatches(pairs, topics, seed=seed)
    batches = list(source.batches(turn, size))
    assert len(batches) == batch_count(len(source), size)
    seen = [query for batch in batches for query in batch.queries]
    assert Counter(seen) <= Counter(pairs.texts)
    assert len(seen) == len(batches) * size
    topic_of = dict(zip(pairs.texts, topics.tolist(), strict=True))
    # Topics come one after another, so cutting into n batches cuts at most n − 1 of the 4 runs in two.
    kinds = sum(len({topic_of[query] for query in batch.queries}) for batch in batches)
    assert kinds <= 4 + len(batches) - 1
    rest = list(source.batches(turn, size, first=1))
    assert [batch.queries for batch in rest] == [batch.queries for batch in batches[1:]]


def test_topics_are_clusters_of_queries(concept_corpus, labels, module_static_encoder):
    source = by_topic(LabeledPairs(concept_corpus, *labels), module_static_encoder, batch_size=20, seed=0)
    assert set(source.topics.tolist()) == set(range(4))
    orders = [[batch.queries for batch in source.batches(turn, 20)] for turn in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


# -------------------------------------------------------------------------------------------------------------- TSDAE


@given(st.text(alphabet="abc xyz.", max_size=60), st.integers(0, 99))
def test_damage_leaves_some_tokens_in_order(text, seed):
    kept = WORD_OR_MARK.findall(damaged(text, np.random.default_rng(seed)))
    rest = iter(WORD_OR_MARK.findall(text))
    assert all(token in rest for token in kept)
    assert bool(kept) == bool(text.strip())


def test_damage_deletes_three_in_five():
    text = " ".join(["word"] * 20_000)
    assert len(damaged(text, np.random.default_rng(0)).split()) == pytest.approx(8000, rel=0.05)


def test_denoising_trains_the_encoder_the_same_way_twice(concept_corpus, bert_folder):
    recipe = Recipe.for_encoder(
        static=False, train="encoder", epochs=1, epoch_pairs=48, batch_size=16, learning_rate=1e-3
    )
    encoders = [Encoder.load(bert_folder, device="cpu") for _ in range(2)]
    before = encoders[0].fingerprint
    for encoder in encoders:
        denoise(encoder, concept_corpus, recipe)
    assert encoders[0].fingerprint == encoders[1].fingerprint != before
    assert not encoders[0].model.training


def test_denoising_refuses_what_cannot_decode(concept_corpus, gtr_folder):
    with pytest.raises(InputError, match=r"tsdae: .* cannot serve as its own decoder"):
        denoise(Encoder.load(gtr_folder, device="cpu"), concept_corpus, SMALL)


# ------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "name", [name for name, system in SYSTEMS.items() if system.needs != "transformer" and not system.written]
)
def test_every_system_for_a_static_encoder_builds_and_searches(name, task):
    built = SYSTEMS[name].build(task)
    corpus = task.corpus
    queries = [query.text for query in task.dev.queries.values()]
    hits = built.searcher.search(queries, 7)
    assert len(hits) == len(queries)
    for ranked in hits:
        assert len(ranked) <= 7
        assert {hit.id for hit in ranked} <= set(corpus.ids)
        assert len({hit.id for hit in ranked}) == len(ranked)
        assert [hit.score for hit in ranked] == sorted((hit.score for hit in ranked), reverse=True)
    assert built.index_bytes > 0
    assert built.training_seconds >= 0


def test_tsdae_learns_from_no_document_that_it_chooses_by(bert_folder, concept_corpus, monkeypatch):
    task = Task(concept_corpus, str(bert_folder), Recipe(train="encoder", epochs=1, batch_size=8, dev_queries=24))
    learnt: list[str] = []
    monkeypatch.setattr(tsdae, "denoise", lambda encoder, corpus, recipe, *, progress: learnt.extend(corpus.ids))
    SYSTEMS["tsdae"].build(task)
    recipe = replace(task.recipe, mode="unsupervised")
    sources, _ = sources_and_devset(concept_corpus, task.load_encoder(), LabelSets(), recipe)
    assert len(sources.held_out) == 24
    assert set(learnt) == set(concept_corpus.ids) - {concept_corpus.ids[position] for position in sources.held_out}


@pytest.mark.parametrize("name", ["simcse", "tsdae"])
def test_systems_for_transformers(name, task, bert_folder):
    recipe = Recipe.for_encoder(static=False, train="encoder", epochs=1, epoch_pairs=32, batch_size=16, dev_queries=24)
    built = SYSTEMS[name].build(replace(task, encoder=str(bert_folder), recipe=recipe))
    assert len(built.searcher.search(["w1 w2"], 3)[0]) == 3
    assert 0 <= built.facts["mix"] <= 1


def test_labels_help_pefa_on_the_queries_they_come_from(task):
    """Asked the very queries it was given, PEFA must find their documents at least as well as the start encoder."""
    plain = SYSTEMS["fitted"].build(task).searcher
    before = evaluate(plain, *task.pairs, ["nDCG@10"]).means["nDCG@10"]
    for name in ("pefa-xs", "pefa-xl"):
        built = SYSTEMS[name].build(task)
        assert built.facts["mix"] in LAMBDAS
        assert evaluate(built.searcher, *task.pairs, ["nDCG@10"]).means["nDCG@10"] > before


def test_unsupervised_systems_never_see_labels(task, monkeypatch):
    seen, task = [], replace(task, built={})  # nothing that an earlier test trained
    monkeypatch.setattr(
        "hce_lab.comparison.systems.train",
        lambda *args, **options: seen.append(options) or (_ for _ in ()).throw(InputError("enough")),
    )
    for name in ("ict", "hce-u", "hce"):
        with pytest.raises(InputError, match="enough"):
            SYSTEMS[name].build(task)
    assert [(each["pairs"], each["dev"], each["generated"]) for each in seen[:2]] == [(None, None, None)] * 2
    assert (seen[2]["pairs"], seen[2]["dev"], seen[2]["generated"]) == (task.pairs, task.dev, None)
    assert not seen[0]["recipe"].tree
    assert seen[1]["recipe"].tree


def test_systems_with_and_without_the_tree_differ_in_the_tree_alone(task, monkeypatch):
    seen, task = [], replace(task, built={})  # nothing that an earlier test trained
    monkeypatch.setattr(
        "hce_lab.comparison.systems.train",
        lambda *args, **options: seen.append(options) or (_ for _ in ()).throw(InputError("enough")),
    )
    for one, other in WITHOUT_TREE.items():
        for name in (one, other):
            with pytest.raises(InputError, match="enough"):
                SYSTEMS[name].build(task)
        with_tree, without = seen[-2:]
        assert replace(with_tree.pop("recipe"), tree=False) == without.pop("recipe")
        assert with_tree == without


def test_a_killed_run_is_continued(task, tmp_path, monkeypatch):
    """The state of the training run is kept in the task's folder, and gone when it is done."""
    original, calls = TrainingRun.save, []

    def dying(run):
        original(run)
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(TrainingRun, "save", dying)
    here = replace(task, folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        trained(tree=False)(here)
    assert (tmp_path / "model.unfinished").is_dir()
    continued = trained(tree=False)(here)
    assert len(calls) == 3  # the start and the first epoch were not run again
    whole = trained(tree=False)(replace(task, folder=tmp_path / "other"))
    np.testing.assert_array_equal(continued.searcher.vectors, whole.searcher.vectors)
    assert not (tmp_path / "model.unfinished").exists()
    again = trained(tree=False)(here)  # finished, and killed before it was measured
    np.testing.assert_array_equal(again.searcher.vectors, whole.searcher.vectors)


# --------------------------------------------------------------------------------------------------------- the choice


def test_the_choice_follows_the_data(task):
    bare = replace(task, pairs=None, dev=None, generated=None)
    assert choose([], bare, is_static=True) == [
        *(
            "bm25",
            "untrained",
            "fitted",
            "hybrid",
            "served",
            "rrf",
            "ct",
            "no-tree",
            "hce",
            "hce-hybrid",
            "no-tree-hybrid",
        )
    ]
    assert choose([], bare, is_static=False) == [
        *("bm25", "untrained", "hybrid", "served", "rrf", "ct", "no-tree", "hce", "hce-hybrid", "no-tree-hybrid")
    ]
    everything = choose([], task, is_static=True)
    assert set(DEFAULT) <= set(everything)
    assert "no-tree+qg" in everything


def test_hce_never_comes_without_the_same_training_without_the_tree(task):
    assert choose(["hce", "bm25"], task, is_static=True) == ["bm25", "no-tree", "hce"]
    assert choose(["bm25"], task, is_static=True) == ["bm25"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bm26", "unknown system 'bm26'; there are bm25, "),
        ("dpr", "system 'dpr' needs labeled training queries"),
        ("hce+qg", "system 'hce.qg' needs generated queries"),
        ("tsdae", "system 'tsdae' needs a transformer, and this encoder is static"),
        ("simcse", "system 'simcse' needs a transformer"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(name, message, task):
    with pytest.raises(InputError, match=message):
        choose(["bm25", name], replace(task, pairs=None, dev=None, generated=None), is_static=True)
    if name == "dpr":
        with pytest.raises(InputError, match="needs a static encoder"):
            choose(["fitted"], task, is_static=False)


def test_two_systems_of_the_same_training_train_once(task, monkeypatch):
    trained_with = []

    def counted(*arguments, **options):
        trained_with.append(options["recipe"].seed)
        return hce.train(*arguments, **options)

    monkeypatch.setattr("hce_lab.comparison.systems.train", counted)
    task = replace(task, built={})
    built = {name: SYSTEMS[name].build(task) for name in ("hce", "hce-hybrid", "no-tree", "no-tree-hybrid")}
    assert len(trained_with) == 2
    assert built["hce-hybrid"].training_seconds == built["hce"].training_seconds
    SYSTEMS["hce-hybrid"].build(task.with_settings(seed=7))
    assert trained_with[-1] == 7
