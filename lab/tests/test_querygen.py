"""Generated queries: sampled by seed alone, filtered by a round trip, written once and for all, whatever is killed."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from hce.data.corpus import Corpus
from hce.data.judgments import read_generated
from hce.data.text import Document
from hce.errors import FormatError, InputError
from hce.training.pairs import LabeledPairs
from hce_lab.generation.generator import EXAMPLES, Generator, _first_line, _Sampling
from hce_lab.generation.querygen import Journal, QueryCounts, drawn_documents, generate_queries, own_ranks

PASSAGES = ["star red w1 w2 w3", "cell green w40", "law blue w99 w98 w97 w96", "ship"]


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    from conftest import word_tokenizer

    tokenizer = word_tokenizer()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[SEP]")


@pytest.fixture(scope="module", params=["t5", "gpt2"])
def generator_folder(request, tmp_path_factory):
    """A random model of either kind, which writes nonsense, but the same nonsense each time."""
    torch.manual_seed(1)
    tokenizer = tiny_tokenizer()
    size = len(tokenizer)
    if request.param == "t5":
        config = T5Config(
            vocab_size=size, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
        )
        model = T5ForConditionalGeneration(config)
    else:
        model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_positions=512, n_embd=16, n_layer=1, n_head=2))
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def few_documents(concept_corpus) -> Corpus:
    return Corpus.from_documents(list(concept_corpus)[:30])


class Echo:
    """A writer whose queries are the passage's first words and its seed; it can die on the way."""

    name = "echo"
    batch_size = 3

    def __init__(self, die_at: int | None = None) -> None:
        self.die_at = die_at
        self.read = 0

    def generate(self, passages, seeds):
        if self.die_at is not None and self.read >= self.die_at:
            raise KeyboardInterrupt
        self.read += len(passages)
        return [f"{' '.join(text.split()[:2])} {seed[-1]}" for text, seed in zip(passages, seeds, strict=True)]


# ---------------------------------------------------------------------------------------------------------- the model


def test_what_is_written_depends_on_the_seed_alone(generator_folder):
    generator = Generator.load(str(generator_folder), device="cpu")
    seeds = [[7, i] for i in range(4)]
    together = generator.generate(PASSAGES, seeds)
    alone = [generator.generate([passage], [seed])[0] for passage, seed in zip(PASSAGES, seeds, strict=True)]
    assert together == alone
    assert generator.generate(PASSAGES[::-1], seeds[::-1]) == together[::-1]
    assert generator.generate(PASSAGES, [[8, i] for i in range(4)]) != together
    assert len(set(generator.generate([PASSAGES[0]] * 5, [[7, 0, i] for i in range(5)]))) > 1
    assert generator.dtype == torch.float32


def test_sampling_draws_from_the_softmax():
    probabilities = np.array([0.6, 0.3, 0.1])
    scores = torch.log(torch.tensor([[*probabilities, 0.0]]))  # the last one was cut off by top-k: minus infinity
    drawn = Counter(int(_Sampling([[seed]])(torch.zeros(1, 1), scores).argmax()) for seed in range(2000))
    assert drawn[3] == 0
    for token, share in enumerate(probabilities):
        assert drawn[token] / 2000 == pytest.approx(share, abs=0.04)


def test_only_the_first_line_counts_and_no_copy_of_an_example():
    assert _first_line(" what  is a star \nPassage: more") == "what is a star"
    assert _first_line(f" {EXAMPLES[1][1]}\n") == ""
    assert _first_line("\n\n") == ""


def test_a_model_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match=r"no query generator '.*nowhere': .*smollm2"):
        Generator.load(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FormatError, match="empty: a damaged query generator"):
        Generator.load(str(tmp_path / "empty"))


# ----------------------------------------------------------------------------------------------------------- the file


def test_the_file_is_what_training_reads(few_documents, tmp_path):
    written = generate_queries(few_documents, Echo(), tmp_path / "q.jsonl", per_document=2)
    assert written == QueryCounts(30, 60, 60)
    queries, qrels = read_generated(tmp_path / "q.jsonl")
    assert len(queries) == 60
    assert len(LabeledPairs(few_documents, queries, qrels)) == 60
    first = json.loads((tmp_path / "q.jsonl").read_text().splitlines()[0])
    words = few_documents[0].full_text.split()[:2]
    assert first == {"document": "d0", "query": f"{' '.join(words)} 0"}
    assert [path.name for path in tmp_path.iterdir()] == ["q.jsonl"]  # no journal is left


def test_a_real_model_writes_a_file(concept_corpus, generator_folder, tmp_path):
    generator = Generator.load(str(generator_folder), device="cpu")
    for name in ("a.jsonl", "b.jsonl"):
        generate_queries(concept_corpus, generator, tmp_path / name, limit=6)
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert set(read_generated(tmp_path / "a.jsonl")[1].judgments()) != set()


@pytest.mark.parametrize("die_at", [0, 1, 4, 20])
@pytest.mark.parametrize("torn", [0, 5])
def test_killed_and_continued_is_the_same_file(few_documents, tmp_path, die_at, torn):
    generate_queries(few_documents, Echo(), tmp_path / "whole.jsonl")
    dying = Echo(die_at)
    with pytest.raises(KeyboardInterrupt):
        generate_queries(few_documents, dying, tmp_path / "q.jsonl")
    journal = tmp_path / "q.jsonl.unfinished"
    assert not (tmp_path / "q.jsonl").exists()
    if torn:
        os.truncate(journal, max(0, journal.stat().st_size - torn))  # the kill came in the middle of a line
    rest = Echo()
    generate_queries(few_documents, rest, tmp_path / "q.jsonl")
    assert (tmp_path / "q.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert rest.read == 30 - dying.read + bool(torn and dying.read)
    assert not journal.exists()


def test_another_runs_journal_is_refused_and_left_alone(concept_corpus, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        generate_queries(concept_corpus, Echo(9), tmp_path / "q.jsonl", seed=1)
    before = (tmp_path / "q.jsonl.unfinished").read_bytes()
    with pytest.raises(InputError, match="unfinished run with seed 1, not 2"):
        generate_queries(concept_corpus, Echo(), tmp_path / "q.jsonl", seed=2)
    assert (tmp_path / "q.jsonl.unfinished").read_bytes() == before
    (tmp_path / "q.jsonl.unfinished").write_text("hello\n")
    with pytest.raises(FormatError, match="not the journal"):
        generate_queries(concept_corpus, Echo(), tmp_path / "q.jsonl")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("q.csv", {}, "written as .jsonl"),
        ("there.jsonl", {}, "exists"),
        ("no/q.jsonl", {}, "there is no folder"),
        ("q.jsonl", {"per_document": 0}, "per_document 0"),
        ("q.jsonl", {"limit": -1}, "limit -1"),
        ("q.jsonl", {"within": 0}, "within 0"),
    ],
)
def test_bad_input_costs_nothing(concept_corpus, tmp_path, name, options, message):
    (tmp_path / "there.jsonl").write_text("")
    writer = Echo()
    with pytest.raises(InputError, match=message):
        generate_queries(concept_corpus, writer, tmp_path / name, **options)
    assert writer.read == 0
    assert [path.name for path in tmp_path.iterdir()] == ["there.jsonl"]


def test_a_limit_draws_documents_at_random():
    chosen = drawn_documents(1000, 100, seed=3)
    assert len(set(chosen.tolist())) == 100
    assert chosen.tolist() == sorted(chosen.tolist())
    assert chosen.max() > 500
    assert drawn_documents(1000, 100, seed=3).tolist() == chosen.tolist()
    assert drawn_documents(1000, 100, seed=4).tolist() != chosen.tolist()
    assert drawn_documents(5, 9, seed=0).tolist() == drawn_documents(5, 0, seed=0).tolist() == [0, 1, 2, 3, 4]


def test_a_documents_seed_is_its_own(few_documents, tmp_path):
    """Whatever else is in the corpus or drawn from it, a document has the same seeds, and no two have the same."""
    seen: dict[str, set[tuple[int, ...]]] = {}

    class Noting(Echo):
        def generate(self, passages, seeds):
            for passage, seed in zip(passages, seeds, strict=True):
                seen.setdefault(passage, set()).add(tuple(seed))
            return super().generate(passages, seeds)

    generate_queries(few_documents, Noting(), tmp_path / "a.jsonl", per_document=2)
    assert len(set().union(*seen.values())) == 60
    before = {passage: set(seeds) for passage, seeds in seen.items()}
    generate_queries(Corpus.from_documents(list(few_documents)[::-1]), Noting(), tmp_path / "b.jsonl", per_document=2)
    assert seen == before


def test_empty_and_equal_queries_count_once(tmp_path):
    class Dull(Echo):
        def generate(self, passages, seeds):
            return ["" if seed[-1] == 2 else "same" for seed in seeds]

    corpus = Corpus.from_documents([Document("a", "one"), Document("b", "two")])
    assert generate_queries(corpus, Dull(), tmp_path / "q.jsonl", per_document=4) == QueryCounts(2, 2, 2)


# --------------------------------------------------------------------------------------------------------- the filter


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000))
def test_ranks_are_those_of_a_sort(seed, concept_corpus, module_static_encoder):
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 240, size=5).tolist()
    queries = [" ".join(f"w{w}" for w in rng.integers(0, 200, size=4)) for _ in positions]
    ranks = own_ranks(queries, positions, concept_corpus, module_static_encoder)
    scores = (
        module_static_encoder.encode(queries, "query") @ module_static_encoder.encode(list(concept_corpus.texts())).T
    )
    for row, position in enumerate(positions):
        order = sorted(range(240), key=lambda i: -scores[row, i])
        assert scores[row, order[ranks[row]]] == pytest.approx(scores[row, position], abs=1e-6)


def test_the_filter_keeps_what_leads_back(concept_corpus, module_static_encoder, tmp_path, monkeypatch):
    """Every other query is the text of another document, which is found in its place."""

    class Liar(Echo):
        def generate(self, passages, seeds):
            self.read += len(passages)
            texts = [document.full_text for document in concept_corpus]
            return [texts[(i + 1) % 240] if (i := texts.index(text)) % 2 else text for text in passages]

    monkeypatch.setattr("hce.search.engine.SCORES_AT_ONCE", 1000)  # several blocks
    written = generate_queries(concept_corpus, Liar(), tmp_path / "q.jsonl", encoder=module_static_encoder, within=1)
    assert written == QueryCounts(240, 240, 120)
    kept = {judgment.document_id for judgment in read_generated(tmp_path / "q.jsonl")[1].judgments()}
    assert kept == {f"d{i}" for i in range(0, 240, 2)}


def test_the_filter_draws_the_line_where_it_says(few_documents, module_static_encoder, tmp_path):
    generate_queries(few_documents, Echo(), tmp_path / "all.jsonl")
    queries, _ = read_generated(tmp_path / "all.jsonl")
    ranks = own_ranks([query.text for query in queries.values()], range(30), few_documents, module_static_encoder)
    within = int(np.sort(ranks)[15])  # some document stands exactly there, and is out
    kept = generate_queries(
        few_documents, Echo(), tmp_path / "kept.jsonl", encoder=module_static_encoder, within=max(1, within)
    ).kept
    assert within >= 1
    assert kept == (ranks < within).sum() < 30


def test_when_nothing_is_left_the_work_is_not_lost(few_documents, tmp_path):
    writer = Echo()
    positions = drawn_documents(30, 5, seed=0)
    assert 29 not in positions
    with pytest.raises(InputError, match="none of 5 generated queries is left"):
        generate_queries(few_documents, writer, tmp_path / "q.jsonl", limit=5, encoder=_LastOne(), within=1)
    assert not (tmp_path / "q.jsonl").exists()
    assert generate_queries(few_documents, writer, tmp_path / "q.jsonl", limit=5).kept == 5
    assert writer.read == 5  # nothing was written anew


class _LastOne:
    """An encoder to which the last document is nearest, whatever is asked."""

    dim, is_table = 2, True
    device = torch.device("cpu")

    def encode(self, texts, kind="document"):
        if kind == "query":
            return np.tile(np.float32([[0, 1]]), (len(texts), 1))
        return np.stack([np.ones(len(texts)), np.arange(len(texts))], axis=1).astype(np.float32)


# -------------------------------------------------------------------------------------------------------- the journal


def test_a_journal_grows_by_whole_lines(tmp_path):
    journal = Journal(tmp_path / "j", {"run": 1})
    assert journal.open() == 0
    journal.append([["é"], ["b"]])
    assert Journal(tmp_path / "j", {"run": 1}).open() == 2
    assert list(journal.items()) == [["é"], ["b"]]
    (tmp_path / "j").write_bytes(b'{"ru')
    assert journal.open() == 0
    assert (tmp_path / "j").read_bytes() == b'{"run": 1}\n'
    journal.remove()
    assert not (tmp_path / "j").exists()
    with pytest.raises(InputError, match="cannot be written"):
        Journal(tmp_path / "no" / "j", {}).open()


def test_the_command_line(concept_corpus, module_static_encoder, generator_folder, tmp_path, capsys):
    from hce_lab.commands import generate_queries as command

    (tmp_path / "docs.jsonl").write_text("\n".join(document.to_json() for document in list(concept_corpus)[:20]))
    module_static_encoder.save(tmp_path / "encoder")
    options = {"model": str(generator_folder), "per_document": 1, "limit": 4, "within": 20, "seed": 0}
    command(
        corpus=tmp_path / "docs.jsonl",
        output=tmp_path / "q.jsonl",
        encoder=str(tmp_path / "encoder"),
        keep=True,
        as_json=True,
        **options,
    )
    answer = json.loads(capsys.readouterr().out)
    assert answer["documents"] == 4
    assert answer["kept"] == len(read_generated(tmp_path / "q.jsonl")[0])
    shutil.rmtree(tmp_path / "encoder")
    paths = {"corpus": tmp_path / "docs.jsonl", "output": tmp_path / "r.jsonl"}
    command(**paths, encoder="none", keep=False, as_json=False, **options)
    assert "queries, written for 4 documents" in capsys.readouterr().out
