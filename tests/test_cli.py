"""The command line's contract: stdout for results, stderr for the rest, exit codes 0, 1 and 2, one line an error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock

import pytest
import typer

from hce import cli
from hce.commands.common import parse_fields
from hce.commands.train import LabelFiles, _label_sets
from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.errors import InputError
from hce.training.recipe import Recipe
from hce.tree.hierarchy import Hierarchy


def run_process(*arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command as a user would."""
    command = [sys.executable, "-m", "hce", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def encoder_folder(tmp_path_factory, request):
    static = request.getfixturevalue("module_static_encoder")
    folder = tmp_path_factory.mktemp("encoder") / "static"
    static.save(folder)
    return str(folder)


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory, planted_corpus):
    path = tmp_path_factory.mktemp("corpus") / "planted.jsonl"
    path.write_text("\n".join(document.to_json() for document in planted_corpus))
    return path


def test_version_and_help():
    assert run_process("--version").stdout.startswith("hce 0.")
    shown = run_process("--help")
    assert shown.returncode == 0
    assert {"tree", "demo", "train"} <= set(shown.stdout.split())


def test_no_work_and_no_torch_at_import():
    """Nor where the facts of a model are read, as `hce status` does, nor by a server before it answers."""
    for module, heavy in (("hce.training.model_folder", ("torch", "faiss")), ("hce.web.app", ("torch", "sklearn"))):
        code = f"import sys, hce, {module}; print([name for name in {heavy!r} if name in sys.modules])"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == "[]"


MISTYPED = {
    "search": ["nowhere", "some text"],
    "add": ["nowhere", "nowhere.jsonl"],
    "remove": ["nowhere", "a"],
    "status": ["nowhere"],
    "rebuild": ["nowhere"],
    "serve": ["nowhere"],
    "check": ["nowhere"],
    "report": ["nowhere"],
    "tree": ["nowhere.jsonl"],
    "train": ["nowhere.jsonl", "-o", "model"],
    "index": ["nowhere.jsonl", "-o", "index"],
    "generate-queries": ["nowhere.jsonl", "-o", "queries.jsonl"],
    "evaluate": ["nowhere", "-m", "static"],
    "compare": ["nowhere"],
}
OUTPUTS = ("train", "index", "tree", "generate-queries")


def test_what_is_mistyped_is_told_before_torch_is_imported(corpus_file, tmp_path):
    """And so is an output under a folder that does not exist, and what help there is."""
    commands = [[name, *arguments] for name, arguments in MISTYPED.items()]
    commands += [[name, str(corpus_file), "-o", "no-folder/output.jsonl"] for name in OUTPUTS]
    code = (
        "import json, sys; from typer.testing import CliRunner; from hce.cli import app; "
        "told = [str(CliRunner().invoke(app, each).exception) for each in json.loads(sys.argv[1])]; "
        "shown = CliRunner().invoke(app, ['--help']).exit_code; "
        "heavy = {'torch', 'transformers', 'sklearn', 'scipy', 'fastapi', 'plotly'} & set(sys.modules); "
        "print(json.dumps([told, shown, sorted(heavy)]))"
    )
    command = [sys.executable, "-c", code, json.dumps(commands)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    told, shown, heavy = json.loads(run.stdout)
    assert (shown, heavy) == (0, [])
    assert all("nowhere" in line for line in told[: len(MISTYPED)]), told
    assert all("there is no folder" in line for line in told[len(MISTYPED) :]), told


def test_tree_of_a_corpus(run_hce, corpus_file, encoder_folder, tmp_path):
    run = run_hce("tree", str(corpus_file), "--encoder", encoder_folder, "--output", str(tmp_path / "tree"))
    assert run.returncode == 0, run.stderr
    assert "240 documents, 3 levels" in run.stdout
    assert "saved to" in run.stderr
    saved = Hierarchy.load(tmp_path / "tree")
    assert len(saved) == 240
    again = run_hce("tree", str(tmp_path / "tree"))
    assert again.stdout == run.stdout  # names and sizes were saved with it


def test_tree_as_json_from_standard_input(corpus_file, encoder_folder):
    run = run_process("tree", "-", "--encoder", encoder_folder, "--json", "-b", "4", stdin=corpus_file.read_text())
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert answer["tree"]["size"] == 240
    assert [level["nodes"] for level in answer["levels"]] == [4, 15, 60]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tree", "nowhere.jsonl"), "nowhere.jsonl: no such file"),
        (("tree", "{corpus}", "--encoder", "/no/such/model"), "no encoder '/no/such/model'"),
        (("tree", "{corpus}", "--encoder", "{encoder}", "-b", "1"), "branching factor 1"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_1(run_hce, arguments, message, corpus_file, encoder_folder):
    filled = [argument.format(corpus=corpus_file, encoder=encoder_folder) for argument in arguments]
    run = run_hce(*filled)
    assert run.returncode == 1
    assert run.stdout == ""
    errors = [line for line in run.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in run.stderr


def test_no_command_has_more_than_sixteen_options():
    commands = typer.main.get_command(cli.app).commands
    counts = {
        name: sum(parameter.param_type_name == "option" for parameter in command.params)
        for name, command in commands.items()
    }
    assert len(counts) >= 15
    assert max(counts.values()) <= 16, counts


def test_every_setting_is_listed_with_its_default(run_hce):
    run = run_hce("train", "--help-settings")
    assert run.returncode == 0
    listed = {words[0]: words[1] for line in run.stdout.splitlines() if len(words := line.split()) > 1}
    assert {each.name for each in fields(Recipe)} | {"recipe", "tracker", "strict"} <= set(listed)
    assert (listed["batch_size"], listed["span_lengths"], listed["mask"]) == ("256", "8,16,32", "true")


@pytest.mark.parametrize(
    ("items", "fields"),
    [
        (["id=nr,text=body,title=head"], {"id_field": "nr", "text_field": "body", "title_field": "head"}),
        (["id=a, b", "text=c"], {"id_field": "a, b", "text_field": "c"}),
        (["id=,text=body"], {"row_ids": True, "text_field": "body"}),
        (["title=x=y"], {"title_field": "x=y"}),
    ],
)
def test_fields_are_read_from_one_option(items, fields):
    assert parse_fields(items) == fields


@pytest.mark.parametrize("item", ["nr", "text=", "id=a,id=b", "name=x", "id=a,size=2"])
def test_fields_that_mean_nothing_are_refused(item):
    with pytest.raises(InputError, match=f"--fields {item}: give some of id=NAME"):
        parse_fields([item])


def test_wrong_usage_is_exit_code_2(run_hce):
    assert run_hce("tree").returncode == 2
    assert run_hce("tree", "x", "--no-such-option").returncode == 2
    assert run_hce("no-such-command").returncode == 2


@pytest.fixture(scope="module")
def concepts_file(tmp_path_factory, concept_corpus):
    path = tmp_path_factory.mktemp("concepts") / "concepts.jsonl"
    path.write_text("\n".join(document.to_json() for document in concept_corpus))
    return path


QUICK = ("--epochs", "1", "--set", "batch_size=32", "--set", "dev_queries=24", "--set", "span_lengths=4")


def test_train_writes_a_model_and_says_what_it_did(run_hce, concepts_file, encoder_folder, tmp_path):
    model = tmp_path / "model"
    run = run_hce("train", str(concepts_file), "-o", str(model), "--encoder", encoder_folder, *QUICK)
    assert run.returncode == 0, run.stderr
    assert "unsupervised training" in run.stdout
    assert f"the model is in {model}" in run.stdout
    assert "epoch 0 · dev" in run.stderr
    assert "epoch 1 · dev" in run.stderr
    assert run_hce("tree", str(model)).stdout.startswith("240 documents, 3 levels")
    again = run_hce("train", str(concepts_file), "-o", str(model), "--encoder", encoder_folder, *QUICK)
    assert again.returncode == 1
    assert "exists and is not an empty folder" in again.stderr


def test_train_with_labels_as_json(run_hce, concepts_file, encoder_folder, tmp_path):
    queries, qrels = tmp_path / "q.jsonl", tmp_path / "train.tsv"
    queries.write_text("\n".join(json.dumps({"_id": f"q{i}", "text": f"w{i} w{i + 5}"}) for i in range(60)))
    qrels.write_text("query-id\tcorpus-id\tscore\n" + "\n".join(f"q{i}\td{i}\t1" for i in range(60)))
    options = ("--encoder", encoder_folder, "--labels", f"queries={queries},qrels={qrels}", *QUICK)
    run = run_hce("train", str(concepts_file), "-o", str(tmp_path / "model"), "--json", *options)
    assert run.returncode == 0, run.stderr
    answer = json.loads(run.stdout)
    assert set(answer) == {"model", "before", "after", "mix", "shares", "stages", "calibration"}
    facts = json.loads((tmp_path / "model" / "hce.json").read_text())
    assert facts["recipe"]["mode"] == "joint"
    qrels.write_text("q0\tnowhere\t1")
    wrong = run_hce("train", str(concepts_file), "-o", str(tmp_path / "other"), *options)
    assert wrong.returncode == 1
    assert f"{qrels}: 1 of 1 pairs name documents that are not in the corpus (the first is 'nowhere')" in wrong.stderr
    assert not (tmp_path / "other").exists()


def test_pairs_of_documents_that_are_gone_are_left_out_and_counted(tmp_path, capsys):
    corpus = Corpus.from_documents([Document("d0", "star"), Document("d1", "moon")])
    files = [tmp_path / name for name in ("q.jsonl", "train.tsv", "dev.tsv", "generated.jsonl")]
    files[0].write_text('{"id": "q0", "text": "bright"}\n{"id": "q1", "text": "pale"}\n')
    files[1].write_text("q0\td0\t1\nq0\tgone\t1\nq1\tgone\t1\n")
    files[2].write_text("q1\td1\t1\n")
    files[3].write_text('{"document": "d0", "query": "sun"}\n{"document": "gone", "query": "sea"}\n')
    labels = _label_sets(tmp_path, corpus, LabelFiles(*files), "joint", strict=False)
    assert list(labels["pairs"].qrels.judgments()) == [("q0", "d0", 1)]
    assert list(labels["dev"].qrels.judgments()) == [("q1", "d1", 1)]
    assert [judgment.document_id for judgment in labels["generated"].qrels.judgments()] == ["d0"]
    said = capsys.readouterr().err
    assert f"{files[1]}: 2 of 3 pairs name documents that are not in the corpus ('gone' …) and are skipped" in said
    assert f"{files[3]}: 1 of 2 pairs" in said
    with pytest.raises(InputError, match=r"generated\.jsonl: 1 of 2 pairs name documents that are not in the corpus"):
        _label_sets(tmp_path, corpus, LabelFiles(*files), "joint", strict=True)
    with pytest.raises(InputError, match="line 2: document 'gone' is not in the corpus"):
        _label_sets(tmp_path, corpus, LabelFiles(*files[:3], None), "joint", strict=True)


def test_ctrl_c_says_how_to_continue(concepts_file, encoder_folder, tmp_path):
    command = [sys.executable, "-m", "hce", "train", str(concepts_file), "-o", str(tmp_path / "m")]
    command += ["--encoder", encoder_folder, "--epochs", "5000", "--set", "batch_size=8", "--set", "patience=5000"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in run.stderr:
        if line.startswith("epoch 1 "):
            run.send_signal(signal.SIGINT)
            break
    rest = run.communicate(timeout=120)[1]
    assert run.returncode == 130
    assert "--resume continues" in rest
    assert "Traceback" not in rest
    assert [path.name for path in tmp_path.iterdir()] == ["m.unfinished"]


def test_ctrl_c_before_training_has_nothing_to_continue(run_hce, concepts_file, encoder_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("hce.encoding.encoder.Encoder.load", Mock(side_effect=KeyboardInterrupt))
    run = run_hce("train", str(concepts_file), "-o", str(tmp_path / "m"), "--encoder", encoder_folder)
    assert run.returncode == 130
    assert "stopped; training had not begun; run the same command again" in run.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--labels", "queries=q.jsonl"), "queries= needs qrels= or dev="),
        (("--labels", "clicks=q.jsonl"), "--labels clicks=q.jsonl: give some of queries=FILE, qrels=FILE"),
        (("--labels", "qrels=a.tsv", "--labels", "qrels=b.tsv"), "--labels qrels=b.tsv: give some of"),
        (("--mode", "unsupervised", "--labels", "generated=g.jsonl"), "leave qrels= and generated= out of --labels"),
        (("--set", "span_lengths=many"), "give a value such as 8,16,32"),
        (("--set", "batchsize=8"), "unknown setting batchsize; did you mean batch_size?"),
        (("--set", "recipe=papers"), "choose one of measured, paper"),
        (("--set", "strict=perhaps"), "strict 'perhaps': give a value such as false"),
        (("--epochs", "2", "--set", "epochs=3"), "--set epochs=3: epochs is given twice"),
        (("--set", "alpha=1", "--set", "alpha=2"), "--set alpha=2: alpha is given twice"),
        (("--fields", "id=a,name=b"), "--fields id=a,name=b: give some of id=NAME, text=NAME, title=NAME"),
        (("--mode", "supervised"), "needs labeled pairs"),
    ],
)
def test_train_refuses_what_it_cannot_do(run_hce, concepts_file, encoder_folder, tmp_path, options, message):
    run = run_hce("train", str(concepts_file), "-o", str(tmp_path / "m"), "--encoder", encoder_folder, *options)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
@pytest.mark.parametrize("arguments", [("--version",), ("tree", "{tree}"), ("tree", "{tree}", "--json")])
def test_a_full_stdout_is_one_line(arguments, planted_corpus, module_static_encoder, tmp_path):
    Hierarchy.build(module_static_encoder.encode(list(planted_corpus.texts()))).save(tmp_path / "tree")
    filled = [argument.format(tree=tmp_path / "tree") for argument in arguments]
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "hce", *filled]
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
    assert run.returncode == 1
    assert run.stderr == "error: No space left on device; check the disk's space, the path and its permissions\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "error: not enough memory; "),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "error: not enough memory; "),
        (OSError(5, "Input/output error", "/mnt/a"), "error: /mnt/a: Input/output error; check"),
        (Exception("Permission denied (os error 13)"), "error: Permission denied; check"),
    ],
)
def test_what_the_machine_refuses_is_one_line(monkeypatch, capfd, error, line):
    def refused(prog_name):
        raise error

    monkeypatch.setattr(cli, "app", refused)
    monkeypatch.setattr(sys, "argv", ["hce"])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    shown = capfd.readouterr().err
    assert shown.startswith(line)
    assert shown.count("\n") == 1


def test_a_bug_still_shows_its_traceback(monkeypatch, capfd):
    def broken(prog_name):
        raise ValueError("mine")

    monkeypatch.setattr(cli, "app", broken)
    monkeypatch.setattr(sys, "argv", ["hce"])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    shown = capfd.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("this is a bug in hce; please report it with the lines above and the command you ran\n")


@pytest.mark.parametrize(("seed", "fault"), [("-1", "greater than or equal to 0"), (str(2**32), "4294967295")])
@pytest.mark.parametrize("command", [("tree", "x"), ("train", "x", "-o", "y")])
def test_seeds_that_no_generator_takes(command, seed, fault, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["hce", *command, "--seed", seed])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert fault in capfd.readouterr().err
