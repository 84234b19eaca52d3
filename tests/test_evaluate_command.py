"""`hce evaluate`: a table or one JSON document on stdout, files on request, one line where the input is wrong."""

from __future__ import annotations

import json
import shutil
import sys
from typing import NamedTuple

import numpy as np
import pytest

import hce.cli
from hce.data.corpus import Corpus
from hce.data.judgments import Dataset
from hce.data.records import Reading
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.evaluation.evaluate import DenseSearcher, evaluate
from hce.evaluation.runs import read_run
from hce.evaluation.significance import compare_paired, holm
from hce.index.index import Index


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(monkeypatch, capsys):
    """Run `hce evaluate` in this process, as main() does it."""

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["hce", "evaluate", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            hce.cli.main()
        return Outcome(stopped.value.code or 0, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory, planted_corpus):
    """The planted corpus with 48 queries of two words of a document, and a query whose own id is a document's."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "qrels").mkdir()
    (folder / "corpus.jsonl").write_text("\n".join(document.to_json() for document in planted_corpus))
    queries, judged = [], ["query-id\tcorpus-id\tscore"]
    for number, document in enumerate(planted_corpus[::5]):
        queries.append({"_id": f"q{number}", "text": " ".join(document.text.split()[2:7])})
        judged.append(f"q{number}\t{document.id}\t1")
    queries.append({"_id": planted_corpus[0].id, "text": planted_corpus[0].text})
    judged += [f"{planted_corpus[0].id}\t{planted_corpus[1].id}\t1", f"q0\t{planted_corpus[1].id}\t0"]
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    (folder / "qrels" / "test.tsv").write_text("\n".join(judged))
    (folder / "qrels" / "dev.tsv").write_text("\n".join(judged[:5]))
    return folder


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory, module_static_encoder):
    folder = tmp_path_factory.mktemp("encoder") / "static"
    module_static_encoder.save(folder)
    return folder


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory, module_static_encoder, planted_corpus):
    folder = tmp_path_factory.mktemp("other") / "fitted"
    module_static_encoder.fitted_to(planted_corpus).save(folder)
    return folder


@pytest.fixture(scope="module")
def expected(folder, module_static_encoder):
    """The same through the Python interface."""
    dataset = Dataset.load(folder)
    vectors = module_static_encoder.encode(list(dataset.corpus.texts()))
    searcher = DenseSearcher(module_static_encoder, dataset.corpus.ids, vectors)
    return evaluate(searcher, dataset.queries, dataset.qrels, ["nDCG@10", "RR@10", "R_cap@5"])


CHOSEN = ("--measures", "NDCG@10,mrr@10,capped_recall@5")


def test_a_table_run_and_values_of_each_query(run, folder, encoder_folder, expected, tmp_path):
    files = ("--run", tmp_path / "run.trec.gz", "--per-query", tmp_path / "each.tsv")
    outcome = run(folder, "-m", encoder_folder, *CHOSEN, *files)
    assert outcome.code == 0, outcome.err
    assert f"{folder} · test · 49 queries · 240 documents" in outcome.out
    for name in ("nDCG@10", "RR@10", "R_cap@5"):
        assert [name, f"{expected.means[name]:.4f}"] in [line.split() for line in outcome.out.splitlines()]
    rows = [line.split("\t") for line in (tmp_path / "each.tsv").read_text().splitlines()]
    assert rows[0] == ["query", "nDCG@10", "RR@10", "R_cap@5"]
    assert {row[0]: float(row[1]) for row in rows[1:]} == expected.per_query["nDCG@10"]
    assert len(read_run(tmp_path / "run.trec.gz")["q0"]) == 100

    again = run(folder, "--run-file", tmp_path / "run.trec.gz", *CHOSEN, "--per-query", tmp_path / "each.jsonl")
    assert again.code == 0, again.err
    figures = [line.split() for line in outcome.out.splitlines()[-3:]]
    assert [line.split() for line in again.out.splitlines()[-3:]] == figures
    values = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    assert {each["query"]: each["RR@10"] for each in values} == expected.per_query["RR@10"]


def test_json(run, folder, encoder_folder, expected):
    outcome = run(folder, "-m", encoder_folder, *CHOSEN, "--json")
    answer = json.loads(outcome.out)
    assert answer["measures"] == pytest.approx(expected.means)
    assert (answer["queries"], answer["documents"], answer["split"]) == (49, 240, "test")
    assert answer["without_positives"] == []
    assert "against" not in answer


def test_the_query_itself_is_dropped_unless_kept(run, folder, encoder_folder, planted_corpus, tmp_path):
    own = planted_corpus[0].id
    run(folder, "-m", encoder_folder, "--run", tmp_path / "dropped.trec")
    run(folder, "-m", encoder_folder, "--run", tmp_path / "kept.trec", "--keep-self")
    assert own not in [hit.id for hit in read_run(tmp_path / "dropped.trec")[own]]
    assert read_run(tmp_path / "kept.trec")[own][0].id == own
    # Also where the run of another tool has it in.
    values = json.loads(run(folder, "--run-file", tmp_path / "kept.trec", "--json").out)["measures"]
    kept = json.loads(run(folder, "--run-file", tmp_path / "kept.trec", "--json", "--keep-self").out)["measures"]
    assert values == json.loads(run(folder, "--run-file", tmp_path / "dropped.trec", "--json").out)["measures"]
    assert kept["nDCG@10"] < values["nDCG@10"]


def test_runs_of_unequal_depth_are_compared_to_the_same_depth(run, folder, encoder_folder, tmp_path):
    run(folder, "-m", encoder_folder, "--run", tmp_path / "deep.trec", "--measures", "AP", "--depth", "200")
    run(folder, "-m", encoder_folder, "--run", tmp_path / "flat.trec", "--measures", "AP", "--depth", "2")
    options = ("--measures", "AP", "--depth", "2", "--json")

    def measured(*files) -> dict:
        return json.loads(run(folder, "--run-file", *files, *options).out)

    both = measured(tmp_path / "deep.trec", "--against", tmp_path / "flat.trec")
    assert both["against"]["paired"]["AP"]["equal"] == 49
    alone = [measured(tmp_path / name)["measures"]["AP"] for name in ("deep.trec", "flat.trec")]
    assert alone[0] > alone[1]  # a run that is measured by itself is measured as it is


def test_against_another_model_or_run(run, folder, encoder_folder, other_folder, tmp_path):
    run(folder, "-m", other_folder, "--run", tmp_path / "other.trec")
    options = ("-m", encoder_folder, "--measures", "nDCG@10,R@5", "--json")
    by_model = json.loads(run(folder, *options, "--against", other_folder).out)
    by_run = json.loads(run(folder, *options, "--against", tmp_path / "other.trec").out)
    assert by_model["against"]["paired"] == by_run["against"]["paired"]
    assert by_model["measures"] != by_model["against"]["measures"]
    values = {}
    for system in (encoder_folder, other_folder):
        run(folder, "-m", system, "--measures", "nDCG@10,R@5", "--per-query", tmp_path / "each.jsonl")
        values[system] = [json.loads(line) for line in (tmp_path / "each.jsonl").read_text().splitlines()]
    paired = {
        name: compare_paired(*({each["query"]: each[name] for each in values[system]} for system in values))
        for name in ("nDCG@10", "R@5")
    }
    corrected = holm([each.p for each in paired.values()])
    for (name, each), p in zip(paired.items(), corrected, strict=True):
        assert by_model["against"]["paired"][name] == pytest.approx({**each._asdict(), "p_holm": p})
    table = run(folder, *options[:-1], "--against", other_folder).out
    assert "p (Holm)" in table
    assert f"{paired['nDCG@10'].difference:+.4f}" in table


@pytest.mark.parametrize("mode", ["hybrid", "words"])
def test_a_model_scores_as_an_index_of_it(run, folder, encoder_folder, tmp_path, mode):
    corpus = Dataset.load(folder).corpus
    Index.create(tmp_path / "index", corpus, encoder_folder).close()
    options = ("--mode", mode, "--measures", "nDCG@10,R@100", "--json")
    served = json.loads(run(folder, "-m", tmp_path / "index", *options).out)["measures"]
    assert json.loads(run(folder, "-m", encoder_folder, *options).out)["measures"] == pytest.approx(served, abs=1e-6)


def test_an_index_scores_as_its_model(run, folder, encoder_folder, tmp_path):
    """Searched exactly, through its own store; a judged document that was removed is told, and cannot be found."""
    index = Index.create(tmp_path / "index", Corpus.load(folder), Encoder.load(encoder_folder))
    model = json.loads(run(folder, "-m", encoder_folder, "--json").out)
    answer = run(folder, "-m", tmp_path / "index", "--mode", "dense", "--against", encoder_folder, "--json")
    assert json.loads(answer.out)["measures"] == pytest.approx(model["measures"], abs=1e-6)
    assert "are not there" not in answer.err
    judged = next(iter(Dataset.load(folder).qrels.positives("q1")))
    index.remove([judged])
    fewer = run(folder, "-m", tmp_path / "index", "--json")
    assert f"1 of the collection's 240 are missing ('{judged}' …)" in fewer.err
    assert json.loads(fewer.out)["measures"]["R@100"] < model["measures"]["R@100"]


@pytest.mark.parametrize(
    ("renamed", "said"), [("other-{}", "holds none of the 240 documents"), ("{}", "its documents have ids of")]
)
def test_an_index_of_another_collection_is_refused(run, folder, encoder_folder, tmp_path, renamed, said):
    others = [Document(renamed.format(each.id), f"not {each.text}") for each in Corpus.load(folder)]
    Index.create(tmp_path / "index", others, Encoder.load(encoder_folder)).close()
    outcome = run(folder, "-m", tmp_path / "index")
    assert (outcome.code, outcome.out) == (1, "")
    assert said in outcome.err


def test_documents_with_fields_of_their_own(run, folder, encoder_folder, tmp_path):
    """By --fields, or as the index that is measured remembers; the figures are those of the usual names."""
    shutil.copytree(folder, tmp_path / "own")
    own = [
        {"nr": each["_id"], "words": each["text"], "head": each["title"]} for each in _lines(folder / "corpus.jsonl")
    ]
    (tmp_path / "own" / "corpus.jsonl").write_text("\n".join(map(json.dumps, own)))
    named = ("--fields", "id=nr,text=words,title=head")
    usual = json.loads(run(folder, "-m", encoder_folder, "--json").out)["measures"]
    assert run(tmp_path / "own", "-m", encoder_folder).code == 1
    assert json.loads(run(tmp_path / "own", "-m", encoder_folder, "--json", *named).out)["measures"] == usual
    reading = Reading(id_field="nr", text_field="words", title_field="head")
    corpus, encoder = Corpus.load(tmp_path / "own", reading), Encoder.load(encoder_folder)
    Index.create(tmp_path / "index", corpus, encoder).close()
    remembered = json.loads(run(tmp_path / "own", "-m", tmp_path / "index", "--mode", "dense", "--json").out)
    assert remembered["measures"] == usual


def _lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_counts_zero_is_said(run, folder, tmp_path):
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("q0\tx\t1\nq1\ty\t0\nq2\tz\t1\n")
    (tmp_path / "run.trec").write_text("q0 Q0 x 1 1.0 t\nq1 Q0 y 1 1.0 t\nunjudged Q0 y 1 1.0 t\n")
    outcome = run(tmp_path, "--run-file", tmp_path / "run.trec", "--measures", "R@1")
    assert "1 queries have no relevant document ('q1' …) and score 0" in outcome.err
    assert f"{tmp_path / 'run.trec'}: 1 queries have no hits ('q2' …) and score 0" in outcome.err
    assert ["R@1", "0.3333"] in [line.split() for line in outcome.out.splitlines()]


def test_judged_documents_that_are_missing_are_warned_of(run, folder, encoder_folder, tmp_path, caplog):
    for name in ("corpus.jsonl", "queries.jsonl"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "qrels").mkdir()
    judgments = (folder / "qrels" / "test.tsv").read_text()
    (tmp_path / "qrels" / "test.tsv").write_text(judgments + "\nq3\tnowhere\t1\n")
    assert run(tmp_path, "-m", encoder_folder).code == 0
    assert "1 of 50 documents judged relevant are not in the corpus (the first is 'nowhere')" in caplog.text
    (tmp_path / "qrels" / "test.tsv").write_text("q3\tnowhere\t1\nq4\tnowhere else\t1\n")
    outcome = run(tmp_path, "-m", encoder_folder)
    assert outcome.code == 1
    assert "none of the 2 documents judged relevant (the first is 'nowhere') is in the corpus" in outcome.err
    (tmp_path / "qrels" / "test.tsv").write_text("q3\tstar-red-0\t1\nq999\tstar-red-0\t1\n")
    outcome = run(tmp_path, "-m", encoder_folder)
    assert "line 2: query 'q999' is not among the queries" in outcome.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("-m", "static", "--split", "train"),
            "no split 'train' (qrels/train.tsv); choose one of these: dev, test",
        ),
        (("-m", "static", "--measures", "goodness@3"), "unknown measure 'goodness@3'; known are nDCG@10"),
        ((), "give either --model, or --run-file"),
        (("-m", "static", "--run-file", "{tmp}/r"), "give either --model, or --run-file"),
        (("--run-file", "{tmp}/nowhere"), "nowhere: cannot be read"),
        (("--run-file", "{tmp}/empty"), "the run has no hits"),
        (("--run-file", "{tmp}/short"), "short, line 1: 3 columns; a line of a TREC run has 6"),
        (("--run-file", "{tmp}/strange"), "none of the 1 queries of the run (the first is 'x')"),
        (("-m", "static", "--per-query", "{tmp}/values.csv"), "give a file ending in .tsv or .jsonl"),
        (("-m", "static", "--run", "{tmp}/no/run"), "there is no folder"),
        (("-m", "static", "--run", "{tmp}"), "is a folder; give the name of a file"),
        (("-m", "/no/such/model"), "no encoder '/no/such/model'"),
    ],
)
def test_wrong_input_is_one_line_and_changes_nothing(run, folder, tmp_path, options, message):
    (tmp_path / "empty").write_text("")
    (tmp_path / "short").write_text("q1 d1 1.0\n")
    (tmp_path / "strange").write_text("x Q0 d1 1 1.0 t\n")
    before = sorted(tmp_path.iterdir())
    outcome = run(folder, *(option.format(tmp=tmp_path) for option in options))
    assert outcome.code == 1
    assert outcome.out == ""
    assert [line for line in outcome.err.splitlines() if line.startswith("error: ") and message in line]
    assert "Traceback" not in outcome.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_is_none(run, tmp_path):
    assert "no such folder" in run(tmp_path / "nowhere", "-m", "static").err


def test_the_tables_figures_are_those_of_the_vectors(run, folder, encoder_folder, module_static_encoder):
    """Success@1 by the command, and by a matrix product."""
    dataset = Dataset.load(folder)
    documents = module_static_encoder.encode(list(dataset.corpus.texts()))
    ids, found = dataset.corpus.ids, []
    for query_id in dataset.qrels:
        scores = documents @ module_static_encoder.encode([dataset.queries[query_id].text], "query")[0]
        order = [ids[number] for number in np.argsort(-scores)]
        found.append(next(name for name in order if name != query_id) in dataset.qrels.positives(query_id))
    answer = json.loads(run(folder, "-m", encoder_folder, "--json", "--measures", "hit@1").out)
    assert answer["measures"] == {"Success@1": pytest.approx(np.mean(found))}
