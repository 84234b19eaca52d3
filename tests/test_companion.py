"""Companions: put beside an encoder where held-out queries call that better, and nowhere else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from hce.data.corpus import Corpus
from hce.data.judgments import Judgment, Labels, Qrels, Query, read_log
from hce.data.text import Document
from hce.encoding import bundled
from hce.encoding.encoder import Encoder
from hce.encoding.tables import fit_words
from hce.errors import InputError
from hce.index.index import Index
from hce.training.companion import accompany, log_centers, word_table_of
from hce.training.model_folder import mean_over_kinds
from hce.training.pairs import LabelSets, pseudo_devset, sources_and_devset
from hce.training.query_mean import QueryMean
from hce.training.recipe import TRANSFORMER, Recipe
from hce.training.train import improvement, train

QUICK = Recipe.for_encoder(
    static=True, epochs=2, batch_size=32, learning_rate=0.05, span_lengths=(4,), dev_queries=60, fit_static=False
)


@pytest.fixture
def tables_are_at_hand(monkeypatch, static_encoder):
    """A transformer's token table is distilled by model2vec, which takes long; here a random one stands in for it."""
    monkeypatch.setattr("hce.encoding.encoder.load_table_of", lambda model, fingerprint: static_encoder.table)


@pytest.fixture
def dev(concept_corpus):
    return pseudo_devset(concept_corpus, np.arange(0, len(concept_corpus), 7), 400, 0)


def words(corpus, without=()) -> Encoder:
    return Encoder(fit_words(corpus, dim=32, without=np.array(without, dtype=np.int64)), "words")


def test_no_share_is_the_encoder_alone(concept_corpus, static_encoder):
    companion = words(concept_corpus)
    assert accompany(static_encoder, [companion], 0.0, None) is static_encoder
    assert accompany(static_encoder, [companion], 0.3, None).shares == pytest.approx((0.7, 0.3))


def test_documents_without_a_common_word_give_no_words(static_encoder, caplog):
    corpus = Corpus.from_documents([Document("a", "one two"), Document("b", "three four")])
    found = word_table_of(corpus, static_encoder, language="english", without=np.empty(0, dtype=np.int64), seed=0)
    assert found == [] and "gets no words" in caplog.text


def test_a_static_encoder_is_trained_and_gets_the_words(concept_corpus, static_encoder, tmp_path):
    result = train(concept_corpus, static_encoder, recipe=QUICK, output=tmp_path / "model")
    assert result.recipe.train == "both" and len(result.encoder.shares) == 2
    assert "of a score from companions" in improvement(result)
    facts = json.loads((tmp_path / "model" / "hce.json").read_text())
    assert facts["shares"] == list(result.encoder.shares) and facts["static"]
    assert facts["stages"] == result.stages
    assert list(result.stages) == [*(["training"] if result.mix else []), "companions"]  # nothing was fitted
    assert result.stages["companions"] == result.after
    assert "trust_remote_code=True" in (tmp_path / "model" / "README.md").read_text()
    assert not (tmp_path / "model.unfinished").exists()
    again = Encoder.load(tmp_path / "model")
    texts = list(concept_corpus.texts())[:9]
    np.testing.assert_allclose(again.encode(texts), result.encoder.encode(texts), atol=1e-6)


@pytest.mark.parametrize("hold_out", [True, False])
def test_words_that_choose_the_share_do_not_know_the_documents_that_dev_queries_are_made_of(
    concept_corpus, static_encoder, monkeypatch, hold_out
):
    left_out = []

    def noted(corpus, encoder, *, without, **options):
        left_out.append(without.tolist())
        return word_table_of(corpus, encoder, without=without, **options)

    monkeypatch.setattr("hce.training.companion.word_table_of", noted)
    recipe = replace(QUICK, hold_out=hold_out)
    result = train(concept_corpus, static_encoder, recipe=recipe)
    assert [len(each) for each in left_out] == [0, 24]
    sources, _ = sources_and_devset(concept_corpus, static_encoder, LabelSets(), recipe)
    assert left_out[1] == sources.measured.tolist()
    assert result.held_out.tolist() == (sources.measured.tolist() if hold_out else [])


@pytest.mark.usefixtures("tables_are_at_hand")
def test_a_transformer_is_measured_by_few_queries_whatever_is_trained_on(concept_corpus, bert_folder, monkeypatch):
    monkeypatch.setitem(TRANSFORMER, "dev_queries", 8)
    recipe = Recipe.for_encoder(static=False, epochs=1, batch_size=32, span_lengths=(4,), hold_out=False)
    result = train(concept_corpus, Encoder.load(bert_folder), recipe=recipe)
    assert "of 8 documents that are not held out" in result.metric


def test_the_tree_is_of_the_vectors_that_are_returned(concept_corpus, static_encoder):
    result = train(concept_corpus, static_encoder, recipe=QUICK)
    assert result.hierarchy.levels[0].centroids.shape[1] == result.encoder.dim
    assert len(result.hierarchy) == len(concept_corpus)


@pytest.mark.usefixtures("tables_are_at_hand")
def test_a_transformer_stays_as_it_is_beside_a_trained_table(concept_corpus, bert_folder, tmp_path):
    given = Encoder.load(bert_folder)
    texts = list(concept_corpus.texts())[:9]
    plain = given.encode(texts)
    result = train(concept_corpus, given, recipe=QUICK, output=tmp_path / "model")
    assert result.recipe.train == "companion"
    first, *companions = result.encoder.parts
    np.testing.assert_allclose(first.encode(texts), plain, atol=1e-6)
    assert len(companions) == 2 and companions[0].is_table
    assert mean_over_kinds(result.after) > mean_over_kinds(result.before)
    index = Index.create(tmp_path / "index", concept_corpus, tmp_path / "model")
    assert index.search(texts[0], 1)[0].id == concept_corpus[0].id
    assert index.tree is not None and index.tree.hierarchy.levels[0].centroids.shape[1] == result.encoder.dim


@pytest.mark.usefixtures("tables_are_at_hand")
def test_a_transformer_may_be_trained_with_a_companion_or_without(concept_corpus, bert_folder, tmp_path):
    settings = {"epochs": 1, "batch_size": 32, "dev_queries": 120, "span_lengths": (4,)}
    alone = train(
        concept_corpus, Encoder.load(bert_folder), recipe=Recipe.for_encoder(static=False, train="encoder", **settings)
    )
    assert alone.encoder.shares == (1.0,)
    both = train(
        concept_corpus,
        Encoder.load(bert_folder),
        recipe=Recipe.for_encoder(static=False, train="both", **settings),
        output=tmp_path / "model",
    )
    assert both.recipe.train == "both" and len(both.encoder.shares) in (1, 3)


@pytest.mark.usefixtures("tables_are_at_hand")
def test_a_model_with_companions_is_trained_anew_from_its_first_part(concept_corpus, bert_folder, tmp_path):
    train(concept_corpus, bert_folder, recipe=QUICK, output=tmp_path / "model")
    result = train(concept_corpus, Encoder.load(tmp_path / "model"), recipe=QUICK)
    assert len(result.encoder.shares) == 3


def test_settings_that_cannot_be_are_refused(concept_corpus, static_encoder, bert_folder):
    with pytest.raises(InputError, match="is a table itself"):
        train(concept_corpus, static_encoder, recipe=Recipe.for_encoder(static=True, train="companion"))
    with pytest.raises(InputError, match="language 'klingon'"):
        Recipe(language="klingon")
    with pytest.raises(InputError, match="has no dropout"):
        train(concept_corpus, bert_folder, recipe=Recipe.for_encoder(static=False, pseudo="simcse", batch_size=32))


def test_a_table_is_distilled_once(monkeypatch, tmp_path, bert_folder, static_encoder):
    made = []

    def distilled(function, *model, pooling):
        made.append((function, pooling))
        return static_encoder.model[0]

    monkeypatch.setenv("HCE_CACHE", str(tmp_path))
    monkeypatch.setattr(bundled, "_distilled", distilled)
    first, second = (Encoder.load(bert_folder).token_table() for _ in range(2))
    assert made == [("distill_from_model", "mean")] and first.fingerprint == second.fingerprint and first.is_table


def test_a_model_without_tokens_is_one_clear_line(monkeypatch, tmp_path, bert_folder):
    def fails(function, *model, pooling):
        raise ValueError("no vocabulary")

    monkeypatch.setenv("HCE_CACHE", str(tmp_path))
    monkeypatch.setattr(bundled, "_distilled", fails)
    with pytest.raises(InputError, match="no token table can be distilled from this model"):
        Encoder.load(bert_folder).token_table()


# ------------------------------------------------------------------------------------------- words in a hybrid search

PAIRS_OF_WORDS = Corpus.from_documents(Document(f"d{number}", f"w{number} w{number + 100}") for number in range(40))


def test_an_index_takes_over_what_labels_told(concept_corpus, static_encoder, tmp_path):
    queries = {f"q{number}": Query(f"q{number}", concept_corpus[number].text) for number in range(60)}
    labels = Labels(queries, Qrels(Judgment(f"q{number}", concept_corpus[number].id, 1) for number in range(60)))
    recipe = Recipe.for_encoder(static=True, epochs=1, batch_size=32, span_lengths=(4,), fit_static=False)
    result = train(concept_corpus, static_encoder, pairs=labels, recipe=recipe, output=tmp_path / "model")
    assert result.calibration.kind == "labeled"
    facts = json.loads((tmp_path / "model" / "hce.json").read_text())
    facts["calibration"]["shares"]["words"] = 0.7
    (tmp_path / "model" / "hce.json").write_text(json.dumps(facts))
    (tmp_path / "model" / "checksums.json").unlink()  # the change is meant
    assert Index.create(tmp_path / "index", concept_corpus, tmp_path / "model").state.manifest.words_share == 0.7
    index = Index.create(tmp_path / "other", concept_corpus, tmp_path / "model", words_share=0.1)
    assert index.state.manifest.words_share == 0.1


def test_an_index_takes_over_what_labels_told_0_2_0(concept_corpus, static_encoder, tmp_path):
    train(concept_corpus, static_encoder, recipe=QUICK, output=tmp_path / "model")
    facts = json.loads((tmp_path / "model" / "hce.json").read_text())
    facts |= {"calibration": None, "words_share": 0.7}
    (tmp_path / "model" / "hce.json").write_text(json.dumps(facts))
    (tmp_path / "model" / "checksums.json").unlink()  # the change is meant
    assert Index.create(tmp_path / "index", concept_corpus, tmp_path / "model").state.manifest.words_share == 0.7


def test_an_encoder_that_comes_with_companions_is_trained_as_what_it_is(
    tmp_path, concept_corpus, static_encoder, run_hce
):
    """A table with words beside it is a table: not with a transformer's learning rate, whatever is trained."""
    static_encoder.beside([words(concept_corpus)], [0.7, 0.3]).save(tmp_path / "accompanied")
    corpus = tmp_path / "docs.jsonl"
    corpus.write_text("".join(f"{document.to_json()}\n" for document in concept_corpus), encoding="utf-8")
    options = ["--set", "train=encoder", "--epochs", "1", "--encoder", str(tmp_path / "accompanied")]
    run = run_hce("train", str(corpus), "-o", str(tmp_path / "model"), *options)
    assert run.returncode == 0, run.stderr
    facts = json.loads((tmp_path / "model" / "hce.json").read_text(encoding="utf-8"))
    assert facts["recipe"]["learning_rate"] == Recipe.learning_rate


LOG = [f"w{number} w{number + 1}" for number in range(60)]


@pytest.mark.usefixtures("tables_are_at_hand")
def test_a_log_of_queries_centers_a_transformer(concept_corpus, bert_folder, tmp_path):
    """What is saved, loaded and used by sentence-transformers subtracts the same means."""
    given = Encoder.load(bert_folder)
    centers = log_centers(QueryMean.of(LOG, given), given.encode(list(concept_corpus.texts())))
    result = train(concept_corpus, Encoder.load(bert_folder), recipe=QUICK, log=LOG, output=tmp_path / "model")
    assert result.encoder.centres == pytest.approx(centers, abs=1e-5)
    texts = ["w1 w2", "w7"]
    vectors = result.encoder.encode(texts, "query")
    again = Encoder.load(tmp_path / "model")
    np.testing.assert_allclose(again.encode(texts, "query"), vectors, atol=1e-5)
    alone = accompany(given, [], 0.0, centers)
    plain = given.encode(texts, "query") - centers[0]
    np.testing.assert_allclose(
        alone.encode(texts, "query"), plain / np.linalg.norm(plain, axis=1, keepdims=True), atol=1e-5
    )


def test_a_short_log_moves_queries_less(static_encoder):
    vectors = static_encoder.encode(["w1", "w2"])
    same = ["w5 w9"]
    short, long = (log_centers(QueryMean.of(same * count, static_encoder), vectors)[0] for count in (5, 500))
    assert np.linalg.norm(short) < np.linalg.norm(long) < 0.75


def test_a_table_is_not_centered_and_the_user_is_told(concept_corpus, static_encoder, caplog):
    assert train(concept_corpus, static_encoder, recipe=QUICK, log=LOG).encoder.centres is None
    assert "the log of queries changes nothing" in caplog.text


def test_no_text_of_a_log_is_kept(concept_corpus, bert_folder, tmp_path, tables_are_at_hand):
    secret = [f"xyzzy{number}" for number in range(30)]
    train(concept_corpus, Encoder.load(bert_folder), recipe=QUICK, log=secret, output=tmp_path / "model")
    for path in (tmp_path / "model").rglob("*"):
        assert not path.is_file() or b"xyzzy" not in path.read_bytes()


JSON_LINES = '{"id": "a", "text": "one query"}\n{"id": "b", "text": "another"}\n'


@pytest.mark.parametrize(("name", "content"), [("log.txt", "one query\n\nanother\n"), ("log.jsonl", JSON_LINES)])
def test_logs_are_read(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    assert read_log(tmp_path / name) == ["one query", "another"]


def test_a_log_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"cannot be read \(No such file or directory\); check the path"):
        read_log(tmp_path / "none.txt")
    (tmp_path / "log.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match="save the file as UTF-8"):
        read_log(tmp_path / "log.txt")


def test_an_empty_log_is_refused(tmp_path):
    (tmp_path / "log.txt").write_text("\n")
    with pytest.raises(InputError, match="no queries in it"):
        read_log(tmp_path / "log.txt")
