"""Generative retrievers: beam search against brute force, the paper's reading of their loss, training that goes on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import WORDS, fast_tokenizer, word_tokenizer, write_concept_dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel, T5ForConditionalGeneration
from typer.testing import CliRunner

from hce.cli import app
from hce.data.corpus import Corpus
from hce.data.judgments import Judgment, Labels, Qrels, Query, write_queries
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, InputError
from hce.evaluation.evaluate import evaluate
from hce.training import co_training as training_state
from hce.training.losses import contrastive, scores_of
from hce.training.recipe import Recipe
from hce_lab.comparison import dsi, generative, generative_training, identifiers, incremental, nci
from hce_lab.comparison.generative import Alphabet, IdNetwork, is_encoder_decoder, new_network
from hce_lab.comparison.generative_training import Prepared, identifier_losses, searcher_of
from hce_lab.comparison.identifiers import Trie, atomic_identifiers, beam_search, clustered_identifiers, padded
from hce_lab.comparison.task import Task, queries_by_document

DOCUMENTS = 200
RECIPE = Recipe(
    train="encoder", epochs=2, epoch_pairs=64, batch_size=16, span_lengths=(5,), dev_queries=24, fit_static=False
)


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """A random token table of 16 dimensions."""
    table = np.random.default_rng(1).normal(size=(len(WORDS), 16)).astype(np.float32)
    model = SentenceTransformer(
        modules=[StaticEmbedding(word_tokenizer(), embedding_weights=table), Normalize()], device="cpu"
    )
    return Encoder(model, "tiny", device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return words_corpus()


def words_corpus() -> Corpus:
    rng = np.random.default_rng(3)
    words = rng.permuted(np.tile(np.arange(200), (DOCUMENTS, 1)), axis=1)[:, :10]
    return Corpus.from_documents(
        [Document(f"d{number}", " ".join(f"w{word}" for word in row)) for number, row in enumerate(words)], name="words"
    )


def queries_about(corpus: Corpus, seed: int) -> Labels:
    """For each document a query of five of its words."""
    rng = np.random.default_rng(seed)
    queries = {
        f"{seed}-{document.id}": " ".join(rng.choice(document.text.split(), 5, replace=False)) for document in corpus
    }
    judgments = [Judgment(name, name.split("-")[1], 1) for name in queries]
    return Labels({name: Query(name, text) for name, text in queries.items()}, Qrels(judgments))


@pytest.fixture(scope="module")
def task(corpus, encoder, tmp_path_factory) -> Task:
    folder = tmp_path_factory.mktemp("encoder") / "tiny"
    encoder.save(folder)
    return task_of(corpus, folder)


def task_of(corpus: Corpus, encoder: Path) -> Task:
    dev = queries_about(corpus, 1)
    return Task(corpus, str(encoder), RECIPE, queries_about(corpus, 0), dev.only(list(dev.queries)[:20]))


# --------------------------------------------------------------------------------------------------- ids and the trie


@st.composite
def random_identifiers(draw) -> np.ndarray:
    """A random tree, at most 4 deep and 4 wide, with the documents numbered at random."""

    def below(depth: int) -> list[list[int]]:
        symbols = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True))
        paths = []
        for symbol in symbols:
            deeper = depth < 4 and draw(st.booleans())
            paths += [[symbol, *rest] for rest in below(depth + 1)] if deeper else [[symbol]]
        return paths

    return padded(draw(st.permutations(below(1))))


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[1, 2], [1, 2]], "documents 0 and 1 cannot be told apart by the ids 1-2 and 1-2"),
        ([[1, 2], [1, -1]], "cannot be told apart by the ids 1-2 and 1"),
        ([[1, 2], [-1, -1]], "id of document 1 is no valid path"),
        ([[-1, 2], [1, 2]], "id of document 0 is no valid path"),
    ],
)
def test_ids_that_cannot_be_told_apart_are_refused(codes, message):
    with pytest.raises(InputError, match=message):
        Trie(np.array(codes))


def drawn_scores(seed: int, prefixes: torch.Tensor) -> torch.Tensor:
    """Log-probabilities drawn anew for each query and prefix, the same ones each time."""
    found = torch.empty(*prefixes.shape[:2], 6, dtype=torch.float64)
    for query, beams in enumerate(prefixes.tolist()):
        for beam, prefix in enumerate(beams):
            rng = np.random.default_rng([seed, query, *(symbol + 1 for symbol in prefix)])
            found[query, beam] = torch.from_numpy(rng.normal(size=6)).log_softmax(0)
    return found


def brute_force(codes: np.ndarray, seed: int, query: int) -> np.ndarray:
    scores = []
    for row in codes:
        path = row[row >= 0].tolist()
        each = [
            drawn_scores(seed, torch.tensor([[path[:t]]] * (query + 1), dtype=torch.int64))[query, 0, s]
            for t, s in enumerate(path)
        ]
        scores.append(float(sum(each)))
    return np.array(scores)


@settings(max_examples=15, deadline=None)
@given(random_identifiers(), st.integers(0, 99), st.integers(1, 300), st.integers(1, 12))
def test_beam_search_is_brute_force(codes, seed, width, k):
    """A wide beam ranks as scoring every document does; a narrow one may miss some, and scores the rest alike."""
    trie = Trie(codes)
    best = beam_search(partial(drawn_scores, seed), 2, trie, width, k)
    widest = max(len(level.symbol) for level in trie.levels)
    for query in range(2):
        expected = brute_force(codes, seed, query)
        positions, scores = (each[query] for each in (best.positions, best.scores))
        there = positions >= 0
        np.testing.assert_allclose(scores[there], expected[positions[there]], rtol=1e-9)
        assert (np.diff(scores[there]) <= 0).all()
        assert len(set(positions[there].tolist())) == there.sum()
        if width >= widest:
            assert positions[there].tolist() == np.argsort(-expected, kind="stable")[:k].tolist()


def test_equal_documents_stay_in_order():
    trie = Trie(padded([[3], [1, 0], [0], [1, 2]]))
    best = beam_search(lambda prefixes: torch.zeros(*prefixes.shape[:2], 4), 1, trie, 10, 10)
    assert best.positions.tolist() == [[0, 1, 2, 3]]


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 90), st.integers(2, 4), st.integers(4, 9), st.booleans())
def test_clustered_ids_are_short_and_all_different(documents, branching, leaf, are_equal):
    vectors = np.random.default_rng(documents).normal(size=(documents, 4)).astype(np.float32)
    codes = clustered_identifiers(vectors[:1].repeat(documents, 0) if are_equal else vectors, branching, leaf)
    Trie(codes)  # refuses what cannot be told apart
    last = np.take_along_axis(codes, (codes >= 0).sum(1)[:, None] - 1, axis=1)
    assert last.max() < leaf
    assert (codes < np.where(codes == last, leaf, branching)).all()
    assert (codes.shape[1] == 1) == (documents <= leaf)


def test_clustered_ids_begin_alike_where_documents_are():
    vectors = np.repeat(np.eye(3, dtype=np.float32), 20, axis=0)
    vectors += np.random.default_rng(0).normal(scale=0.01, size=vectors.shape).astype(np.float32)
    codes = clustered_identifiers(vectors, 3, 20)
    assert [len(set(codes[start : start + 20, 0].tolist())) for start in (0, 20, 40)] == [1, 1, 1]
    assert len(set(codes[:, 0].tolist())) == 3
    assert np.array_equal(codes, clustered_identifiers(vectors, 3, 20))


@pytest.mark.parametrize("build", [dsi.build_dsi_atomic, incremental.build_incdsi, incremental.build_continual])
def test_too_many_documents_for_atomic_ids(build, task, monkeypatch):
    """Before anything is trained, also where the tenth that is added later makes it too many."""
    monkeypatch.setattr(generative_training, "fit", lambda *_, **__: pytest.fail("was trained"))
    monkeypatch.setattr(identifiers, "MOST_ATOMIC", 190)
    with pytest.raises(InputError, match=r"^200 documents are too many for atomic ids.*\(limit 190\)"):
        build(task)
    assert len(atomic_identifiers(190)) == 190


# -------------------------------------------------------------------------------------------------------- the network


def network_for(encoder: Encoder, codes: np.ndarray, kind: type[IdNetwork] = IdNetwork, **options) -> IdNetwork:
    alphabet = Alphabet(int(codes.max()) + 1, codes.shape[1], **options)
    return new_network(encoder, alphabet, RECIPE, kind).double().eval()


TEXTS = ["w1 w2 w3", "w7", "", "w11 w13 w17 w19 w23"]


def test_atomic_dsi_is_contrastive_over_all_documents(encoder):
    """The paper's Sec. 3: with the rows of the head as vectors of documents, and the decoder's state as the query's."""
    codes = atomic_identifiers(30)
    network = network_for(encoder, codes)
    memory = network.read(TEXTS)
    right = torch.tensor([3, 0, 29, 11])
    state = network.states(memory, torch.empty(4, 1, 0, dtype=torch.int64))[:, 0, 0]
    scores = scores_of(state, network.head, 1.0)  # (4, 30)
    others = torch.stack([torch.arange(30)[torch.arange(30) != each] for each in right])
    expected = contrastive(scores.gather(1, right[:, None])[:, 0], scores.gather(1, others))
    torch.testing.assert_close(network.losses(memory, right[:, None]), expected)


@pytest.mark.parametrize("by_step", [False, True])
def test_hierarchical_dsi_is_one_contrastive_loss_a_step(encoder, by_step):
    codes = torch.tensor([[2, 4, 1], [0, 3, -1], [1, -1, -1], [2, 4, 0]])
    network = network_for(encoder, codes.numpy(), by_step=by_step)
    memory = network.read(TEXTS)
    expected = torch.zeros(4, dtype=torch.float64)
    for row, path in enumerate(codes.tolist()):
        alone = network.read(TEXTS[row : row + 1])
        for step, symbol in enumerate(each for each in path if each >= 0):
            prefix = codes[row, :step][None, None]
            state = network.states(alone, prefix)[:, 0, -1]
            scores = scores_of(state, network.head[network.alphabet.at(step)], 1.0)[0]
            rest = torch.cat([scores[:symbol], scores[symbol + 1 :]])
            expected[row] += contrastive(scores[symbol][None], rest[None])[0]
    torch.testing.assert_close(network.losses(memory, codes), expected)


def test_the_head_of_nci_is_w_plus_what_the_prefix_gives(encoder):
    codes = torch.tensor([[2, 4, 1], [0, 3, 1]])
    network = network_for(encoder, codes.numpy(), nci.PrefixAwareNetwork, by_step=True)
    torch.nn.init.normal_(network.adaptation.weight)
    memory = network.read(TEXTS[:2])
    states = network.states(memory, codes[:, None, :2])[:, 0]
    for step in range(3):
        given = network.adapted(codes[:, :step])  # (2, size, n)
        rows = network.head[network.alphabet.at(step)] + given
        expected = torch.einsum("bkn,bn->bk", rows, states[:, step])
        torch.testing.assert_close(network.logits(states[:, step], step, codes[:, :step]), expected)
    first, second = (network.adapted(codes[:, :2])[row] for row in range(2))
    assert (first - second).abs().max() > 1e-3  # other rows at other nodes


def test_position_aware_symbols_have_rows_of_their_own():
    codes = torch.tensor([[2, 2, -1]])
    assert Alphabet(5, 3, by_step=True).row_of(codes).tolist()[0][:2] == [2, 7]
    assert Alphabet(5, 3).row_of(codes).tolist()[0][:2] == [2, 2]
    assert (Alphabet(5, 3, by_step=True).rows, Alphabet(5, 3).rows) == (15, 5)


def test_consistency_by_hand():
    """Two examples, read twice, states of width 2, so that inner products are halved; the second has one step."""
    codes = torch.tensor([[0, 4], [1, -1], [0, 4], [1, -1]])
    states = torch.tensor([[2.0, 0], [0, 2], [4, 0], [0, 6]])[:, None].repeat(1, 2, 1)
    found = nci.consistency(states, codes)
    scores = [[0.0, 4.0, 0.0], [0.0, 0.0, 6.0], [4.0, 0.0, 0.0], [0.0, 6.0, 0.0]]  # with the other three, in order
    right = [1, 2, 0, 1]
    by_hand = [torch.tensor(row).logsumexp(0) - row[place] for row, place in zip(scores, right, strict=True)]
    torch.testing.assert_close(found, torch.stack(by_hand))  # in the second step only two are left to tell apart


def test_nci_learns_from_two_readings_and_their_consistency(encoder, monkeypatch):
    codes = torch.tensor([[2, 4, 1], [0, 3, -1], [1, -1, -1], [2, 4, 0]])
    network = network_for(encoder, codes.numpy(), nci.PrefixAwareNetwork, by_step=True)
    twice, states = codes.repeat(2, 1), network.step_states(network.read(TEXTS * 2), codes.repeat(2, 1))
    expected = network.losses(network.read(TEXTS), codes) + 0.15 * nci.consistency(states, twice)[:4]
    torch.testing.assert_close(network.training_losses(TEXTS, codes), expected)  # without dropout, both are the same
    network.train()
    monkeypatch.setattr(nci, "CONSISTENCY", 0.0)
    torch.manual_seed(0)
    logs = network.losses(network.read(TEXTS * 2), twice)
    torch.manual_seed(0)
    torch.testing.assert_close(network.training_losses(TEXTS, codes), logs.view(2, -1).mean(0))
    assert (logs[:4] - logs[4:]).abs().min() > 0  # and with dropout, they are not


def test_both_ways_of_asking_a_text_are_the_same():
    torch.manual_seed(0)
    attention = generative.TextAttention(128).double().eval()
    there = torch.arange(9) < torch.tensor([9, 4, 1])[:, None]
    memory = generative.EncodedTexts(torch.randn(3, 9, 128, dtype=torch.float64), there)
    asked = torch.randn(3, 5, 128, dtype=torch.float64)
    one, other = (attention(asked, memory, text_last=way) for way in (True, False))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(attention(asked, memory), other)
    changed = memory._replace(states=torch.where(there[..., None], memory.states, 7.0))  # padding is not seen
    torch.testing.assert_close(attention(asked, changed), other)


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t5") / "with a space"
    torch.manual_seed(0)
    T5ForConditionalGeneration(t5_config()).save_pretrained(folder)
    fast_tokenizer().save_pretrained(folder)
    return folder


def t5_config(words: int = len(WORDS), width: int = 16) -> T5Config:
    return T5Config(
        vocab_size=words, d_model=width, d_kv=8, d_ff=width, num_layers=1, num_heads=2, decoder_start_token_id=0
    )


@pytest.mark.parametrize("kind", ["table", "transformer", "encoder-decoder"])
def test_every_kind_of_network_is_searched_as_by_brute_force(kind, encoder, bert_folder, t5_folder):
    given = encoder if kind == "table" else Encoder.load(bert_folder if kind == "transformer" else t5_folder)
    codes = clustered_identifiers(np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32), 3, 5)
    network = network_for(given, codes, nci.PrefixAwareNetwork if kind == "table" else IdNetwork, by_step=True)
    assert is_encoder_decoder(given.name) == (kind == "encoder-decoder")
    searcher = searcher_of(network, [f"d{n}" for n in range(40)], codes)
    with torch.inference_mode():
        for text, hits in zip(TEXTS, searcher.search(TEXTS, 40), strict=True):
            scores = -network.losses(network.read([text] * 40), torch.from_numpy(codes))
            order = scores.argsort(descending=True, stable=True)
            assert [hit.id for hit in hits] == [f"d{position}" for position in order.tolist()]
            np.testing.assert_allclose([hit.score for hit in hits], scores[order], rtol=1e-6)
    assert float(scores.exp().sum()) <= 1 + 1e-6


@pytest.mark.parametrize("kind", ["table", "transformer", "encoder-decoder"])
def test_texts_are_read_as_if_each_were_alone_and_no_further_than_said(
    kind, encoder, bert_folder, t5_folder, monkeypatch
):
    monkeypatch.setattr(generative, "READ_TOKENS", 8)
    given = encoder if kind == "table" else Encoder.load(bert_folder if kind == "transformer" else t5_folder)
    network = network_for(given, atomic_identifiers(3))
    long = " ".join(f"w{n}" for n in range(1, 30))
    texts = [long, *TEXTS, long + " w31", "w2 w3"]
    alone = [network.read([text]) for text in texts]
    monkeypatch.setattr(generative, "TEXTS_AT_ONCE", 3)
    together = network.read(texts)
    for row, one in enumerate(alone):
        torch.testing.assert_close(together.states[row][together.there[row]], one.states[0][one.there[0]])
    assert together.there.sum(1).max() == 8
    assert torch.equal(together.states[0], together.states[-2])  # they differ where neither is read


def test_a_pretrained_decoder_begins_with_its_own_start_token(t5_folder):
    network = new_network(Encoder.load(t5_folder), Alphabet(500, 3), RECIPE)
    rows = network.decoder.network.get_input_embeddings().weight.detach()
    torch.testing.assert_close(network.start.detach(), rows[0])
    assert network.symbols.weight.std().item() == pytest.approx(rows.std().item(), rel=0.05)


def renamed(encoder, name) -> Encoder:
    encoder.name = str(name)
    return encoder


def test_a_decoder_that_is_not_there(tmp_path, t5_folder, encoder):
    half = T5EncoderModel(t5_config())
    half.save_pretrained(tmp_path / "half")
    fast_tokenizer().save_pretrained(tmp_path / "half")
    assert not is_encoder_decoder(str(tmp_path / "half"))  # an encoder: it gets a decoder of its own
    (tmp_path / "half" / "config.json").write_text((t5_folder / "config.json").read_text())
    with pytest.raises(InputError, match=r"half: a model without a decoder \(\d+ weights of it are not there"):
        new_network(renamed(Encoder.load(t5_folder), tmp_path / "half"), Alphabet(3, 1), RECIPE)


def test_an_encoder_without_states_of_tokens(encoder):
    with pytest.raises(InputError, match=r"tiny has no states of tokens .*SideBySide"):
        new_network(encoder.beside([encoder], [0.5, 0.5]), Alphabet(3, 1), RECIPE)


# ----------------------------------------------------------------------------------------------------------- training


def test_a_step_has_the_same_examples_whenever_it_is_asked_for(task):
    prepared = Prepared.of(task)
    stream = prepared.stream.from_step(0)
    whole = [next(stream) for _ in range(30)]
    for step in (1, 13, 29):
        again = next(prepared.stream.from_step(step))
        assert (again.texts, again.positions.tolist()) == (whole[step].texts, whole[step].positions.tolist())
    first = whole[0]
    labeled = {query.text for query in task.pairs.queries.values()}
    assert {text in labeled for text in first.texts[:16]} == {True}
    assert first.weights[:16].sum() == pytest.approx(1)
    assert first.weights[16:].sum() == pytest.approx(RECIPE.alpha)
    texts = [text for each in whole for text in each.texts[16:]]
    starts = {generative_training.start_of(task.corpus, position) for position in range(DOCUMENTS)}
    assert np.mean([text in starts for text in texts]) == pytest.approx(0.5, abs=0.1)
    seen = {position for each in whole for position in each.positions.tolist()}
    assert len(seen) == DOCUMENTS  # none is held out


class KilledError(Exception):
    pass


def run(task: Task, folder, stop_at: int = 0) -> tuple[IdNetwork, generative_training.Progress]:
    """Train DSI; stop after some steps, as a kill would."""
    prepared = Prepared.of(replace(task, folder=folder))
    codes = clustered_identifiers(prepared.vectors(), 3, 10)
    network = prepared.network(Alphabet(10, codes.shape[1]))
    losses = identifier_losses(network, codes)
    taken = 0

    def counted(examples):
        nonlocal taken
        taken += 1
        if taken == stop_at:
            raise KilledError
        return losses(examples)

    return network, prepared.fit(network, counted, "dsi", searcher=searcher_of(network, task.corpus.ids, codes))


def test_a_killed_run_ends_as_it_would_have(task, tmp_path, monkeypatch):
    whole, done = run(task, None)
    assert (done.step, len(done.history)) == (8, 2)
    monkeypatch.setattr(generative_training, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    for stop_at in (3, 4):  # in the first epoch, then in the second
        with pytest.raises(KilledError):
            run(task, tmp_path, stop_at)
    network, again = run(task, tmp_path)
    assert again.history == done.history
    assert again.best == done.best
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name]), name
    finished, once_more = run(task, tmp_path, stop_at=1)  # takes no step any more
    assert once_more.step == 8
    assert torch.equal(finished.head, network.head)


# Where a run is killed: the steps that this process is to take first, and the moment of the last of them.
MOMENTS = {"between two checkpoints": 3, "while a checkpoint is written": 2, "when a checkpoint is named": 2}


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prepare_to_die(moment: str) -> None:
    """Arrange for a kill in a step's midst: its weights have moved, and nothing, half or all of that is on disk."""
    take, taken = generative_training._Run.take, []
    places = {
        "between two checkpoints": (generative_training._Run, "save"),
        "while a checkpoint is written": (training_state, "open_atomically"),  # of the file that names it
        "when a checkpoint is named": (Path, "glob"),  # of what was there before it, to be deleted
    }

    def counting(self: generative_training._Run, *arguments: object) -> None:
        take(self, *arguments)
        taken.append(1)
        if len(taken) == MOMENTS[moment]:
            setattr(*places[moment], die)

    generative_training._Run.take = counting
    generative_training.SECONDS_BETWEEN_CHECKPOINTS = 0.0  # one after every step


def train_and_die(encoder: Path, folder: Path, moment: str) -> None:
    prepare_to_die(moment)
    run(task_of(words_corpus(), encoder), folder)


def compare_and_die(arguments: list[str], moment: str) -> None:
    prepare_to_die(moment)
    app(arguments)


@pytest.fixture(scope="module")
def killed():
    """What runs something in a process of its own, which is to be killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_generative"])

    def start(target: Callable[..., None], *arguments: object) -> None:
        process = context.Process(target=target, args=arguments)
        process.start()
        process.join(timeout=240)
        assert process.exitcode == -signal.SIGKILL

    return start


def test_kill_9_in_any_moment_and_the_weights_are_those_of_a_run_without_it(task, tmp_path, killed):
    whole, done = run(task, None)
    for moment in MOMENTS:  # one after another, each process going on from what the last one left
        killed(train_and_die, task.encoder, tmp_path, moment)
    named = (tmp_path / "dsi" / "LAST").read_text()
    facts = json.loads((tmp_path / "dsi" / named / "facts.json").read_text())
    assert facts["progress"]["step"] == 2 + 1 + 2  # what was on disk whole at each kill
    network, again = run(task, tmp_path)
    assert (again.step, again.history, again.best) == (8, done.history, done.best)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, network.state_dict()[name]), name


def test_a_comparison_goes_on_after_kill_9(task, tmp_path, killed, concept_corpus, monkeypatch):
    dataset = write_concept_dataset(tmp_path / "concepts", concept_corpus, {"train": 40, "test": 20})
    budget = ["--epochs", "1", "--epoch-pairs", "96", "--batch-size", "16"]  # 6 steps
    arguments = ["compare", str(dataset), "--systems", "dsi", "--encoder", task.encoder, *budget]
    results = []
    for place in ("killed", "whole"):
        command = [*arguments, "-o", str(tmp_path / place)]
        if place == "killed":
            killed(compare_and_die, command, "between two checkpoints")
            assert not list((tmp_path / place).rglob("*.json.unfinished/*.json"))
        taken, take = [], generative_training._Run.take
        monkeypatch.setattr(generative_training._Run, "take", lambda *each: (taken.append(1), take(*each)))  # noqa: B023
        finished = CliRunner().invoke(app, command)
        assert not finished.exit_code, finished.output
        (kept,) = (tmp_path / place / "results").iterdir()  # and nothing unfinished
        found = json.loads(kept.read_text())["result"]["test"]
        results.append((found["per_query"], found["facts"]))
        assert len(taken) == (6 - 2 if place == "killed" else 6)
        monkeypatch.undo()
    assert results[0] == results[1]


def test_the_state_of_another_run_and_a_damaged_one(task, tmp_path):
    run(task, tmp_path)
    with pytest.raises(InputError, match="an unfinished run with another setting seed"):
        run(replace(task, recipe=replace(RECIPE, seed=1)), tmp_path)
    state = next((tmp_path / "dsi").glob("state-*"))
    tensors, facts, name = (
        (path, path.read_bytes()) for path in (*sorted(state.iterdir())[::-1], state.parent / "LAST")
    )
    progress = json.loads(facts[1])
    progress["progress"]["step"] = "eight"
    for (path, whole), damage in (
        (tensors, tensors[1][:1000]),
        (facts, facts[1][:100]),
        (facts, json.dumps(progress).encode()),
        (name, b"state-99"),
        (name, b"../elsewhere"),
    ):
        path.write_bytes(damage)
        with pytest.raises(FormatError, match=r"dsi: the state of the run is damaged .*; delete this folder and train"):
            run(task, tmp_path)
        path.write_bytes(whole)
    assert run(task, tmp_path)[1].step == 8


def test_a_loss_that_is_no_number_is_one_line(task):
    prepared = Prepared.of(task)
    network = prepared.network(Alphabet(DOCUMENTS, 1))
    broken = lambda examples: network.head.sum() * torch.full((32,), torch.nan)  # noqa: E731
    with pytest.raises(InputError, match=r"the loss is nan at step 1: .*lower learning_rate"):
        prepared.fit(network, broken, "dsi")


def test_training_leaves_the_encoder_as_it_is(task, bert_folder):
    given = Encoder.load(bert_folder)
    before = given.fingerprint
    network = new_network(given, Alphabet(DOCUMENTS, 1), RECIPE)
    with torch.no_grad():
        for parameter in network.known:
            parameter.add_(1.0)
    assert given.fingerprint == before
    assert sum(each.numel() for each in network.known + network.fresh) == generative.parameter_count(network)


# --------------------------------------------------------------------------------------------------- what they can do


BUILDERS = {"dsi-atomic": dsi.build_dsi_atomic, "dsi": dsi.build_dsi, "nci": nci.build_nci}
LONGER = replace(RECIPE, epochs=1, epoch_pairs=200 * 50, batch_size=50)


@pytest.fixture
def learns_fast(monkeypatch):
    """What is this narrow learns at a higher rate."""
    monkeypatch.setattr(generative_training, "RATE", 1e-2)
    monkeypatch.setattr(generative, "DROPOUT", 0.0)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.usefixtures("learns_fast")
def test_each_system_learns_its_training_queries_by_heart(name, task, monkeypatch):
    """And of others, which it never saw, it finds far more than chance would (R@10 = 0.05)."""
    if name == "nci":  # whose two readings would be the same
        monkeypatch.setattr(generative, "DROPOUT", 0.05)
    built = BUILDERS[name](replace(task, recipe=LONGER))
    assert evaluate(built.searcher, *task.pairs, ["R@1"]).means["R@1"] >= 0.95
    assert evaluate(built.searcher, *queries_about(task.corpus, 2), ["R@10"]).means["R@10"] > 0.4
    assert built.facts["parameters"] > 1000


@pytest.mark.usefixtures("learns_fast")
def test_documents_that_are_added_are_found_and_what_that_costs_the_others(task):
    """What was learned by heart stays where nothing moves; where training goes on, some of it is forgotten."""
    split = incremental.split_off(replace(task, recipe=LONGER))
    new = {document.id for document in split.new}
    by_row, built = incremental.train_incdsi(split.task)
    by_training = incremental.ContinualSearcher(
        *(deepcopy(by_row.network), LONGER, list(by_row.ids)),
        incremental.standing_for(split.task.corpus, LONGER, queries_by_document(split.task.pairs)),
    )
    new_queries = [name for name in task.pairs.qrels if name.split("-")[1] in new]
    asked = {"old": task.pairs.without(new_queries), "new": task.pairs.only(new_queries)}
    assert evaluate(by_row, *asked["old"], ["R@1"]).means["R@1"] >= 0.95
    found = {}
    for name, searcher in (("row", by_row), ("training", by_training)):
        searcher.add(split.new, split.queries)
        found[name] = {kind: evaluate(searcher, *labels, ["R@1"]).means["R@1"] for kind, labels in asked.items()}
    assert found["row"]["old"] >= 0.9
    assert found["row"]["new"] >= 0.8
    assert found["training"]["new"] >= 0.8
    assert 0.3 < found["training"]["old"] < 1
    assert built.facts["parameters"] > 1000


SPLITS = ("train", "dev", "test")
FACTS = {
    "why do tides rise": "The moon pulls the sea, so tides rise twice a day.",
    "what do bees gather": "Bees gather nectar and turn it into honey.",
    "when does iron rust": "Iron rusts when water and air reach it.",
    "how do whales breathe": "Whales breathe air through a hole in the head.",
    "what makes bread swell": "Yeast makes gas, and bread swells.",
    "where does coffee grow": "Coffee grows on high hills near the equator.",
    "why are leaves green": "Leaves are green because of chlorophyll.",
    "who built the pyramids": "Workers of Egypt built the pyramids of stone.",
    "what is glass made of": "Glass is made of sand that was melted.",
    "how fast is light": "Light travels three hundred thousand kilometres in a second.",
    "what do spiders spin": "Spiders spin silk to catch their food.",
    "why does ice float": "Ice floats because it is lighter than water.",
}


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> tuple[Path, Path]:
    """A collection whose test and dev queries are those of training, and a T5 of random weights with a tokenizer."""
    folder = tmp_path_factory.mktemp("facts")
    dataset, model = folder / "facts", folder / "t5"
    (dataset / "qrels").mkdir(parents=True)
    documents = [Document(f"d{number}", text) for number, text in enumerate(FACTS.values())]
    (dataset / "corpus.jsonl").write_text("".join(document.to_json() + "\n" for document in documents))
    asked = {f"{split}{number}": query for split in SPLITS for number, query in enumerate(FACTS)}
    write_queries(dataset / "queries.jsonl", [Query(name, text) for name, text in asked.items()])
    for split in SPLITS:
        Qrels([Judgment(f"{split}{n}", f"d{n}", 1) for n in range(len(FACTS))]).write(
            dataset / "qrels" / f"{split}.tsv"
        )
    # A tokenizer of words, since one that is trained differs from run to run.
    special = ["<pad>", "</s>", "<unk>"]
    words = sorted({word for text in (*FACTS, *FACTS.values()) for word in text.split()})
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(model)
    torch.manual_seed(0)
    T5ForConditionalGeneration(t5_config(tokenizer.get_vocab_size(), width=32)).save_pretrained(model)
    return dataset, model


T5_BUDGET = [
    "--epochs=1",
    "--epoch-pairs=1000",
    "--batch-size=12",
    "--set=learning_rate=1e-2",
    "--set=span_lengths=3,6",
]


@pytest.mark.usefixtures("learns_fast")
def test_a_t5_is_trained_from_the_command_line_with_its_own_decoder(facts, tmp_path, monkeypatch):
    dataset, model = facts
    monkeypatch.setattr(dsi, "BRANCHING", 3)
    monkeypatch.setattr(dsi, "LEAF", 6)  # for ids of several symbols
    read = []
    original = generative.SequenceDecoder.__init__
    monkeypatch.setattr(
        generative.SequenceDecoder, "__init__", lambda self, network: (read.append(1), original(self, network))[1]
    )
    names = ("dsi-atomic", "dsi", "nci", "genret")
    command = ["compare", str(dataset), "--systems", ",".join(names), "--encoder", str(model)]
    done = CliRunner().invoke(app, [*command, *T5_BUDGET, "--measures", "R@1", "-o", str(tmp_path / "out"), "--json"])
    assert not done.exit_code, done.output
    rows = json.loads((tmp_path / "out" / "comparison.json").read_text())["rows"]
    assert len(read) == len(rows) == 4
    assert {row["system"]: row["scores"]["R@1"]["mean"] >= 0.95 for row in rows} == dict.fromkeys(names, True)


# ------------------------------------------------------------------------------------------------- documents are added


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.integers(1, 4))
def test_a_new_row_wins_where_it_should_and_nowhere_else(seed, texts):
    """In as many dimensions as constraints all can be met, also where new texts are like those of old documents."""
    rng = np.random.default_rng(seed)
    rows, known = rng.normal(size=(2, 12, 40))
    known += rows  # each document wins for its own texts by far
    own = known[:texts] + 0.5 * rng.normal(size=(texts, 40))
    row = incremental.new_row(own, rows, known, margin=0.5)
    assert (own @ row >= (own @ rows.T).max(axis=1) + 0.5 - 1e-3).all()
    assert (known @ row <= (known * rows).sum(axis=1) - 0.5 + 1e-3).all()


def test_taking_up_constraints_as_they_are_violated_finds_the_minimum(monkeypatch):
    rng = np.random.default_rng(0)
    rows, known, own = rng.normal(size=(300, 8)), rng.normal(size=(300, 8)), rng.normal(size=(3, 8))  # not all are met
    known += rows
    floor, ceiling = (own @ rows.T).max(axis=1) + 1, (known * rows).sum(axis=1) - 1

    def violation(row):
        return incremental._hinges(row, own, floor, known, ceiling)[0]

    monkeypatch.setattr(incremental, "FIRST_CONSTRAINTS", 4)
    at_once = minimize(incremental._hinges, np.zeros(8), (own, floor, known, ceiling), jac=True, method="L-BFGS-B").x
    assert violation(at_once) > 0.1
    assert violation(incremental.new_row(own, rows, known, margin=1.0)) == pytest.approx(violation(at_once), rel=1e-3)
    step = 1e-6 * rng.normal(size=8)
    value, gradient = incremental._hinges(at_once + 0.1, own, floor, known, ceiling)
    assert violation(at_once + 0.1 + step) - value == pytest.approx(gradient @ step, rel=1e-3)


def test_incdsi_moves_nothing_that_is_there(task):
    searcher, _ = incremental.train_incdsi(task)
    rows = searcher.rows.copy()
    weights = {name: tensor.clone() for name, tensor in searcher.network.state_dict().items()}
    new = [Document(f"new-{number}", f"w{number} w{number + 1} w{number + 2} w{number + 7}") for number in range(5)]
    searcher.add(new[:2])
    searcher.add(new[2:], {"new-3": ["w199 w198"]})
    np.testing.assert_array_equal(searcher.rows[:DOCUMENTS], rows)
    assert all(torch.equal(tensor, searcher.network.state_dict()[name]) for name, tensor in weights.items())
    assert len(searcher.ids) == len(searcher.rows) == len(searcher.known) == DOCUMENTS + 5
    with pytest.raises(InputError, match="'new-0' is there already; nothing was added"):
        searcher.add([Document("other", "w1"), new[0]])
    assert len(searcher.ids) == DOCUMENTS + 5


def test_what_is_added_later_takes_no_part_in_training(task):
    split = incremental.split_off(task)
    new, old = {document.id for document in split.new}, set(split.task.corpus.ids)
    assert (len(new), len(old), new & old) == (20, 180, set())
    for labels in (split.task.pairs, split.task.dev):
        assert {each.document_id for each in labels.qrels.judgments()} <= old
    assert set(split.queries) == new
    assert len(split.task.pairs.qrels) == 180


def test_a_query_that_names_old_documents_and_new_ones_is_both_theirs(task):
    ids = task.corpus.ids
    everything = Labels({"q": Query("q", "w1 w2")}, Qrels([Judgment("q", document_id, 1) for document_id in ids]))
    split = incremental.split_off(replace(task, pairs=everything, generated=None))
    new = {document.id for document in split.new}
    assert split.queries == {document_id: ["w1 w2"] for document_id in new}
    assert set(split.task.pairs.qrels.positives("q")) == set(ids) - new


def test_continual_training_extends_the_head(task):
    searcher, _ = incremental.train_continual(task)
    before = searcher.network.head.detach().clone()
    searcher.recipe = replace(RECIPE, epochs=1)
    searcher.add([Document("new-0", "w1 w2 w3 w4"), Document("new-1", "w5 w6 w7 w8")])
    assert searcher.network.head.shape == (DOCUMENTS + 2, 16)
    assert not torch.equal(searcher.network.head[:DOCUMENTS], before)  # which is what forgets
    hits = searcher.search(["w1 w2 w3 w4"], 300)[0]
    assert len(hits) == DOCUMENTS + 2
    assert hits[0].id == "new-0"
    searcher.add([])
    assert len(searcher.ids) == DOCUMENTS + 2


def test_replay_is_half_old_and_half_new():
    stream = incremental.ReplayStream([[f"t{n}"] for n in range(30)], 20, replace(RECIPE, batch_size=10))
    examples = next(stream.from_step(4))
    assert (examples.positions[:5] >= 20).all()
    assert (examples.positions[5:] < 20).all()
    assert examples.texts == [f"t{position}" for position in examples.positions]
    assert next(stream.from_step(4)).texts == examples.texts
