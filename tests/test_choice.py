"""Which bundled encoder to take: the line that says what the other one costs, and what `auto` stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding import bundled
from hce.encoding.bundled import NDCG, chosen_encoder, minilm_seconds

README = Path(__file__).parent.parent / "README.md"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine without a GPU that does 31 GFLOP/s: MiniLM encodes 1,000 tokens a second."""
    monkeypatch.setattr(bundled, "_operations_per_second", lambda: 31e9)
    monkeypatch.setattr(bundled, "_has_gpu", lambda: False)


def corpus_of(documents: int, tokens: int) -> Corpus:
    text = "x" * round(tokens * bundled.CHARACTERS_PER_TOKEN)
    return Corpus.from_documents([Document(str(number), text) for number in range(documents)])


def test_time_grows_with_the_text_of_which_training_reads_the_beginning():
    assert minilm_seconds(corpus_of(100, 100), "index") == pytest.approx(10, rel=0.02)
    assert minilm_seconds(corpus_of(300, 100), "index") == pytest.approx(30, rel=0.02)
    assert minilm_seconds(corpus_of(100, 1000), "index") == pytest.approx(100, rel=0.02)
    assert minilm_seconds(corpus_of(100, 1000), "train") == pytest.approx(25.6, rel=0.02)


def test_the_line_has_what_the_other_one_costs_and_brings():
    name, line = chosen_encoder("static", corpus_of(2400, 100), "train", "--encoder")
    assert name == "static"
    assert line == (
        "--encoder minilm would take about 4 min here to encode 2,400 documents, and finds more: "
        "nDCG@10 .604 against .552 on the mean of six collections"
    )
    name, line = chosen_encoder("minilm", corpus_of(100, 50), "index", "--model")
    assert name == "minilm"
    assert line.startswith("minilm takes a few seconds here to encode 100 documents; --model static takes seconds")


@pytest.mark.parametrize(("documents", "chosen"), [(1000, "minilm"), (7000, "static")])
def test_auto_goes_by_how_long_it_takes(documents, chosen, monkeypatch):
    corpus = corpus_of(documents, 100)
    name, line = chosen_encoder("auto", corpus, "index", "--model")
    assert name == chosen
    assert line.startswith(f"--model auto: {chosen}, since minilm takes about")
    monkeypatch.setattr(bundled, "_has_gpu", lambda: True)
    assert chosen_encoder("auto", corpus, "index", "--model")[0] == "minilm"


def test_of_other_encoders_nothing_is_said():
    assert chosen_encoder("my-model", corpus_of(1, 1), "index", "--model") == ("my-model", None)


def test_the_figures_are_those_of_the_readme():
    table = README.read_text(encoding="utf-8")
    for by_name in NDCG.values():
        assert all(f"{value:.3f}".removeprefix("0") in table for value in by_name.values())


def test_a_machine_has_a_speed(monkeypatch):
    monkeypatch.undo()
    assert bundled._operations_per_second() > 1e6
