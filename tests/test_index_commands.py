"""The commands around an index: results on stdout, one line an error, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from small_static import small_static

import hce.cli
from hce.data.text import Document
from hce.encoding.encoder import Encoder
from hce.index.derived import LocalPart
from hce.index.index import Index


@pytest.fixture
def run(capfd, monkeypatch):
    """Call the command line in this process, which has torch loaded already."""

    def call(*arguments: str, stdin: str | None = None) -> SimpleNamespace:
        monkeypatch.setattr(sys, "argv", ["hce", *map(str, arguments)])
        read_end, write_end = os.pipe()
        saved = os.dup(0)
        os.write(write_end, (stdin or "").encode())
        os.close(write_end)
        os.dup2(read_end, 0)
        capfd.readouterr()
        try:
            hce.cli.main()
            code = 0
        except SystemExit as stopped:
            code = stopped.code or 0
        finally:
            os.dup2(saved, 0)
            os.close(saved)
            os.close(read_end)
        shown = capfd.readouterr()
        return SimpleNamespace(code=code, out=shown.out, err=shown.err)

    return call


@pytest.fixture(scope="module")
def model(tmp_path_factory, module_static_encoder):
    folder = tmp_path_factory.mktemp("model") / "static"
    module_static_encoder.save(folder)
    return folder


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory, planted_corpus):
    path = tmp_path_factory.mktemp("corpus") / "planted.jsonl"
    path.write_text("\n".join(document.to_json() for document in planted_corpus))
    return path


@pytest.fixture
def index(tmp_path, planted_corpus, module_static_encoder):
    Index.create(tmp_path / "index", planted_corpus, module_static_encoder, "grow").close()
    return tmp_path / "index"


def only_error(result: SimpleNamespace) -> str:
    assert result.code == 1
    assert result.out == ""
    assert "Traceback" not in result.err
    (line,) = [line for line in result.err.splitlines() if line.startswith("error: ")]
    return line


def test_index_search_status_tree(run, corpus_file, model, tmp_path):
    made = run("index", corpus_file, "-m", model, "-o", tmp_path / "index")
    assert made.code == 0, made.err
    search, there = made.out.splitlines()
    assert search.startswith("search: words count 0.50")
    assert there.startswith(f"240 documents are in {tmp_path / 'index'}; ")
    found = run("search", tmp_path / "index", "star red w3", "-k", "2")
    assert found.code == 0
    lines = found.out.splitlines()
    assert len(lines) == 4
    assert lines[0].startswith("  1  1.0000  = 0.50 meaning + 0.50 star red w3  star-red-")
    assert "star-red-" in lines[0]
    assert lines[0].endswith("  star red")
    answer = json.loads(run("search", tmp_path / "index", "star red w3", "-k", "2", "--json").out)
    assert answer["query"] == "star red w3"
    assert [hit["rank"] for hit in answer["hits"]] == [1, 2]
    shown = {"rank", "score", "id", "title", "text", "metadata", "from_meaning", "from_words", "from_tokens", "path"}
    shown |= {"matched", "passage", "first_rank", "folded", "snippet", "snippet_start", "snippet_marks", "title_marks"}
    assert set(answer["hits"][0]) == shown
    assert "meaning + " in lines[0]
    dense = json.loads(run("search", tmp_path / "index", "star red w3", "--mode", "dense", "--json").out)["hits"][0]
    assert (dense["score"], dense["from_words"], dense["matched"]) == (dense["from_meaning"], 0.0, [])
    words = run("search", tmp_path / "index", "nowhere to be found", "--mode", "words")
    assert words.out == "no document shares a word with the query\n"
    wrong = run("search", tmp_path / "index", "star", "--mode", "magic")
    assert (wrong.code, wrong.err) == (1, "error: mode 'magic': choose one of hybrid, dense, words\n")
    assert answer["hits"][0]["id"] in lines[0]
    assert json.loads(run("search", tmp_path / "index", "-", "-k", "2", "--json", stdin="star red w3\n").out) == answer
    status = run("status", tmp_path / "index")
    assert "documents  240 (0 added and 0 removed since it was made)" in status.out
    assert "tree       3 levels" in status.out
    assert json.loads(run("status", tmp_path / "index", "--json").out)["documents"] == 240
    assert run("tree", tmp_path / "index").out.startswith("240 documents, 3 levels")


def test_a_hit_by_stop_words_alone_says_so(run, tmp_path, module_static_encoder):
    documents = [Document(str(number), text) for number, text in enumerate(("the star of", "w40", "w90 w91"))]
    Index.create(tmp_path / "index", documents, module_static_encoder, words_share=0.5).close()
    assert " common words  0" in run("search", tmp_path / "index", "the w3 of").out


def test_the_parts_of_a_score_are_shown_where_meaning_gave_nothing(run, tmp_path, module_static_encoder):
    """As it does to the candidate with the lowest cosine of every hybrid search."""
    texts = ("star red w3", "star w40 w41", "star blue w90 w91 w92")
    documents = [Document(str(number), text) for number, text in enumerate(texts)]
    Index.create(tmp_path / "index", documents, module_static_encoder).close()
    lines = run("search", tmp_path / "index", "star").out.splitlines()[::2]
    assert all(" meaning + " in line for line in lines)
    assert sum("= 0.00 meaning + " in line for line in lines) == 1
    for mode in ("dense", "words"):
        assert "meaning" not in run("search", tmp_path / "index", "star", "--mode", mode).out


def test_index_options_and_json(run, corpus_file, model, tmp_path):
    options = ("-m", model, "-o", tmp_path / "index", "--engine", "exact", "--no-tree", "--json")
    made = run("index", "-", *options, stdin=corpus_file.read_text())
    facts = json.loads(made.out)
    assert (facts["engine"], facts["tree_levels"]) == ("exact", 0)
    assert only_error(run("tree", tmp_path / "index")).endswith("this index carries no tree; index again to get one")
    assert "exists and is not an empty folder" in only_error(run("index", corpus_file, *options[:4]))
    assert "engine 'x': choose" in only_error(
        run("index", corpus_file, "-m", model, "-o", tmp_path / "x", "--engine", "x")
    )
    assert run("index", corpus_file).code == 2


def test_a_search_that_has_much_to_load_says_so(run, index, monkeypatch):
    whole = LocalPart._checked

    def slow(self: LocalPart, *arguments: Any) -> Any:
        time.sleep(0.3)
        return whole(self, *arguments)

    monkeypatch.setattr(LocalPart, "_checked", slow)
    monkeypatch.setattr("hce.progress.SECONDS_TO_FIRST_LINE", 0.1)
    assert "loading the engine: for" in run("search", index, "alpha", "-k", 1).err


def test_add_and_remove(run, index, tmp_path):
    first, second = tmp_path / "1.jsonl", tmp_path / "2.csv"
    first.write_text('{"_id": "x", "text": "w190 w191", "lang": "en", "year": 2001}\n')
    second.write_text("id,text,lang,year\ny,w190 w192,fr,1999\n")
    added = run("add", index, first, second)
    assert added.out == f"added 2; 242 documents are in {index}\n"
    found = json.loads(run("search", index, "w190", "-k", "9", "-w", "year>=1990", "--json").out)["hits"]
    assert {hit["id"] for hit in found} == {"x", "y"}  # of JSON a number, of CSV a text
    found = json.loads(run("search", index, "w190", "-w", "year>=1990", "-w", "lang in fr,de", "--json").out)["hits"]
    assert [hit["id"] for hit in found] == ["y"]
    assert run("search", index, "w190", "-w", "lang=xx").out == "no document matches the conditions\n"
    by_words = run("search", index, "nowhere", "-w", "lang=fr", "--mode", "words")
    assert by_words.out == "no document that matches the conditions shares a word with the query\n"
    answer = json.loads(run("add", index, "-", "--json", stdin='{"id": "z", "text": "w5", "odd": "\\ud800"}').out)
    assert answer == {"index": str(index), "added": 1, "updated": 0, "documents": 243}
    assert json.loads(run("search", index, "w5", "-w", "odd>=", "--json").out)["hits"][0]["metadata"] == {
        "odd": "\ud800"
    }
    replaced = run("add", index, "-", "--update", stdin='{"id": "z", "text": "w6"}')
    assert replaced.out == f"updated 1, added 0; 243 documents are in {index}\n"
    removed = run("remove", index, "x", "y")
    assert removed.out == f"removed 2; 241 documents are in {index}\n"
    answer = json.loads(run("remove", index, "-", "--json", stdin="z\nstar-red-0\n").out)
    assert answer == {"index": str(index), "removed": 2, "documents": 239}
    assert "239 (0 added and 1 removed" in run("status", index).out


def test_the_tree_of_an_index_names_documents_by_id(run, index, planted_corpus):
    def documents(node):
        return node.get("documents", []) + [each for child in node.get("children", []) for each in documents(child)]

    tree = json.loads(run("tree", index, "--json").out)["tree"]
    assert sorted(documents(tree)) == sorted(planted_corpus.ids)
    gone = planted_corpus.ids[3]
    run("remove", index, gone)
    tree = json.loads(run("tree", index, "--json").out)["tree"]
    assert sorted(documents(tree)) == sorted(set(planted_corpus.ids) - {gone})


@pytest.mark.parametrize("text", ["", " \t\n"])
def test_an_empty_query_is_refused(run, index, text):
    assert "the query is empty" in only_error(run("search", index, text))
    assert "the query is empty" in only_error(run("search", index, text, "--mode", "words"))


def test_an_unknown_field_or_sign_is_refused_and_the_known_ones_are_named(run, index, tmp_path):
    (tmp_path / "new.jsonl").write_text('{"id": "n", "text": "star", "meta": {"year": 2001}, "lang": "en"}\n')
    run("add", index, tmp_path / "new.jsonl")
    assert "known fields: " in only_error(run("search", index, "star", "-w", "lnag=en"))
    assert "lang, meta.year" in only_error(run("search", index, "star", "-w", "lnag!=en"))
    assert "there is no '=='" in only_error(run("search", index, "star", "-w", "lang==en"))
    found = json.loads(run("search", index, "star", "-w", "meta.year>2000", "--json").out)
    assert [hit["id"] for hit in found["hits"]] == ["n"]


def test_fields_and_delimiter_of_a_strange_file(run, model, tmp_path):
    path = tmp_path / "export.csv"
    path.write_bytes("Nummer;Überschrift;Inhalt;Jahr\n7;Meer;Salz im Meer;1999\n8;Berg;Schnee;2001\n".encode("cp1252"))
    named = ("--fields", "id=Nummer,title=Überschrift,text=Inhalt", "--encoding", "cp1252")
    done = run("index", path, "-m", model, "-o", tmp_path / "made", *named)
    assert done.code == 0, done.err
    with Index.open(tmp_path / "made") as made:
        assert made.get("7") == Document("7", "Salz im Meer", "Meer", {"Jahr": "1999"})
    assert "no id (found: 'Nummer'" in only_error(
        run("index", path, "-m", model, "-o", tmp_path / "other", "--encoding", "cp1252")
    )
    assert not (tmp_path / "other").exists()


def test_an_index_keeps_the_names_of_its_fields(run, model, tmp_path):
    """What is added needs no --fields; nor does a new index of the documents of this one."""
    path = tmp_path / "packages.jsonl"
    path.write_text('{"package": "tar", "summary": "pack files"}\n{"package": "ls", "summary": "list files"}\n')
    fields = ("--fields", "id=package,title=package,text=summary")
    assert run("index", path, "-m", model, "-o", tmp_path / "first", *fields).code == 0
    assert run("index", tmp_path / "first", "-m", model, "-o", tmp_path / "second").code == 0
    (tmp_path / "more.jsonl").write_text('{"package": "cp", "summary": "copy files", "id": "x"}\n')
    (tmp_path / "usual.jsonl").write_text('{"_id": "mv", "text": "move files"}\n')
    added = run("add", tmp_path / "second", tmp_path / "more.jsonl", tmp_path / "usual.jsonl")
    assert added.code == 0, added.err
    with Index.open(tmp_path / "second") as made:
        assert made.get("cp") == Document("cp", "copy files", "cp", {"id": "x"})
        assert made.get("mv") == Document("mv", "move files")
    (tmp_path / "named.jsonl").write_text('{"package": "rm", "summary": "s", "other": "remove files"}\n')
    run("add", tmp_path / "second", tmp_path / "named.jsonl", "--fields", "id=package,text=other")
    with Index.open(tmp_path / "second") as made:
        assert made.get("rm") == Document("rm", "remove files", "", {"summary": "s"})


def test_ten_identical_documents_give_no_warning_and_no_nan(run, model, tmp_path):
    lines = [json.dumps({"id": str(i), "text": "the same red shoes"}) for i in range(10)]
    (tmp_path / "same.jsonl").write_text("\n".join(lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for command in (
            ("index", tmp_path / "same.jsonl", "-m", model, "-o", tmp_path / "same"),
            ("search", tmp_path / "same", "red shoes"),
            ("status", tmp_path / "same"),
            ("tree", tmp_path / "same", "--json"),
        ):
            outcome = run(*command)
            assert outcome.code == 0, outcome.err
            assert not re.search(r"(?i)\bnan\b|warning", outcome.out + outcome.err)
        trained = run("train", tmp_path / "same.jsonl", "-e", model, "-o", tmp_path / "model", "--epochs", "1")
    assert "each document held out for measuring duplicates another one" in only_error(trained)
    assert not (tmp_path / "model").exists()


def test_a_report_under_a_folder_that_does_not_exist(run, tmp_path):
    output = tmp_path / "gone" / "report.html"
    assert f"there is no folder {tmp_path / 'gone'}" in only_error(run("report", tmp_path, "-o", output))


def test_rebuild(run, index, model):
    run("remove", index, "star-red-0")
    answer = run("rebuild", index, "--engine", "exact")
    assert answer.out == f"rebuilt {index}: 239 documents, 3 levels, exact engine\n"
    assert run("tree", index).out.startswith("239 documents, 3 levels")
    assert json.loads(run("rebuild", index, "--json").out)["engine"] == "exact"


def test_search_shows_the_passage_of_a_long_document(run, index, tmp_path):
    filler = " ".join(f"w{i % 7} w{i % 5}." for i in range(3000))
    sentence = "Law law ship ship star blue green red cell cell w180 w181 w182."
    (tmp_path / "long.jsonl").write_text(Document("long", f"{filler} {sentence} {filler}", "A book").to_json())
    assert run("add", index, tmp_path / "long.jsonl").code == 0
    for mode in ("dense", "hybrid"):
        shown = run("search", index, sentence, "-k", "300", "--mode", mode).out
        (passage,) = [line for line in shown.splitlines() if sentence in line]
        assert passage.startswith("     … w")
        assert passage.endswith(" …")
        assert len(passage) < 1000
    found = json.loads(run("search", index, sentence, "-k", "300", "--json").out)["hits"]
    (hit,) = [hit for hit in found if hit["id"] == "long"]
    assert sentence in hit["text"][slice(*hit["passage"])]
    assert json.loads(run("status", index, "--json", "--no-drift").out)["documents"] == 241


def test_wrong_input_is_one_line_and_nothing_changes(run, index, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"_id": "x", "text": "w1"}\n{"_id": "y", "txt": "w2"}\n')
    good = tmp_path / "good.jsonl"
    good.write_text('{"_id": "x", "text": "w1"}')
    assert f"{bad}, line 2: document 'y' has no text" in only_error(run("add", index, bad))
    assert f"{bad}, line 2: document 'y' has no text" in only_error(run("add", index, good, bad))
    known = '{"_id": "a", "text": "w1"}\n{"_id": "star-red-0", "text": "w1"}'
    assert "id 'star-red-0' is there already" in only_error(run("add", index, "-", stdin=known))
    assert "no document 'nowhere' is there (1 of 2" in only_error(run("remove", index, "star-red-0", "nowhere"))
    assert "condition 'year': write field=value" in only_error(run("search", index, "x", "--where", "year"))
    assert "ask for 1 hit or more" in only_error(run("search", index, "x", "-k", "0"))
    for command in (("status",), ("search", "x"), ("add", str(good)), ("remove", "x"), ("rebuild",)):
        line = only_error(run(command[0], tmp_path / "nowhere", *command[1:]))
        assert f"{tmp_path / 'nowhere'}: no index there" in line
    assert json.loads(run("status", index, "--json").out)["documents"] == 240
    assert run("search", index).code == 2
    assert run("add", index).code == 2


def test_each_command_explains_itself(run):
    for command in ("index", "add", "remove", "search", "status", "rebuild"):
        shown = run(command, "--help")
        assert shown.code == 0
        assert f"hce {command} my-index" in shown.out or "hce index docs" in shown.out
        assert "--json" in shown.out


def test_a_second_writer_on_the_command_line(run, index, monkeypatch):
    monkeypatch.setattr("hce.index.store.SECONDS_TO_WAIT", 0.1)
    with Index.open(index) as opened, opened.state.store.writing():
        line = only_error(run("remove", index, "star-red-0"))
    assert "another process is writing to this index; try again when it is done" in line


def test_ctrl_c_leaves_all_as_it_was(run, index, corpus_file, model, tmp_path, monkeypatch):
    calls = []

    def interrupted(encode):
        def encode_or_stop(self, texts, kind="document", **options):
            calls.append(texts)
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)
            return encode(self, texts, kind, **options)

        return encode_or_stop

    monkeypatch.setattr(Encoder, "encode", interrupted(Encoder.encode))
    monkeypatch.setattr("hce.index.writing.DOCUMENTS_AT_ONCE", 1)  # the first of them is in the transaction by then
    more = "\n".join(f'{{"_id": "x{i}", "text": "w{i}"}}' for i in range(5))
    stopped = run("add", index, "-", stdin=more)
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err == "stopped; nothing was added; run the same command again\n"
    with Index.open(index) as opened:
        assert len(opened) == 240
        assert "x0" not in opened
    del calls[1:]
    stopped = run("index", corpus_file, "-m", model, "-o", tmp_path / "new")
    assert stopped.code == 130
    assert "run the same command again to continue with the vectors encoded so far" in stopped.err
    assert not (tmp_path / "new").exists()
    assert run("index", corpus_file, "-m", model, "-o", tmp_path / "new").code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "new"]


def test_ctrl_c_while_the_engine_is_built_leaves_the_index(run, corpus_file, model, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("hce.index.derived.new_engine", interrupted)
    stopped = run("index", corpus_file, "-m", model, "-o", tmp_path / "new")
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err.endswith(f"stopped; {tmp_path / 'new'} is complete; the next search builds its engine\n")
    monkeypatch.undo()
    assert run("search", tmp_path / "new", "star red w3", "-k", "2").code == 0
    assert json.loads(run("status", tmp_path / "new", "--json").out)["documents"] == 240


# ------------------------------------------------------------------------------------------------- fitted, foreign


def test_a_table_that_was_fitted_to_few_documents_is_told_and_fitted_to_all(run, planted_corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("HCE_CACHE", str(tmp_path / "cache"))
    small_static(tmp_path / "cache", planted_corpus.texts())
    few, all_of_them = tmp_path / "few", tmp_path / "all"
    Index.create(few, planted_corpus[:50], "static").close()
    with Index.open(few) as opened:
        assert opened.add(planted_corpus[50:200]) == 150
    assert "fitted     to 50 documents\n" in run("status", few).out  # 200 are four times as many, and no more
    with Index.open(few) as opened:
        opened.add(planted_corpus[200:])
    assert f"fitted     to 50 documents; hce rebuild {few} fits it to all 240\n" in run("status", few).out
    assert json.loads(run("status", few, "--json").out)["fitted_documents"] == 50

    before = sorted(path.stat().st_mtime_ns for path in few.rglob("*.safetensors"))
    assert run("index", few, "-o", all_of_them).code == 0
    assert "fitted     to 240 documents\n" in run("status", all_of_them).out
    assert sorted(path.stat().st_mtime_ns for path in few.rglob("*.safetensors")) == before
    with Index.open(few) as old, Index.open(all_of_them) as new:
        assert list(new) == list(old)
        assert new.state.manifest.fingerprint == Encoder.for_corpus("static", planted_corpus).fingerprint


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_ten_equal_documents(run, tmp_path, module_static_encoder):
    module_static_encoder.save(tmp_path / "encoder")
    equal = [Document(f"d{number}", "star red w1 w2 w3 w4", title="same") for number in range(10)]
    (tmp_path / "ten.jsonl").write_text("\n".join(document.to_json() for document in equal))
    index = tmp_path / "index"
    for command in (
        ("index", tmp_path / "ten.jsonl", "-o", index, "-m", tmp_path / "encoder"),
        ("search", index, "star"),
        ("search", index, "nothing of it", "--json"),
        ("tree", tmp_path / "ten.jsonl", "--encoder", tmp_path / "encoder", "--json"),
        ("tree", index),
        ("status", index),
        ("add", index, tmp_path / "ten.jsonl", "--update"),
    ):
        done = run(*command)
        assert (done.code, done.err) == (0, ""), command
        assert "nan" not in done.out.lower().split(str(tmp_path).lower())[-1]
    assert "updated 10, added 0" in done.out
    done = run("train", tmp_path / "ten.jsonl", "-o", tmp_path / "model", "--encoder", tmp_path / "encoder")
    assert done.code == 1
    assert "duplicates another one; remove duplicates" in done.err


def test_status_tells_what_fitting_and_training_brought(run, index):
    assert "trained" not in run("status", index, "--no-drift").out.split()  # nothing is known of it
    assert json.loads(run("status", index, "--no-drift", "--json").out)["training"] is None
    facts = {
        "format": 1,
        "hce": "0.2.0",
        "encoder": "static",
        "static": True,
        "fingerprint": "f",
        "metric": "NDCG@10",
        "corpus": {"name": "c", "documents": 3, "fingerprint": "c"},
        "recipe": {"mode": "joint"},
        "mix": 1.0,
        "held_out": [],
        "shares": [1.0],
        "words_share": None,
        "before": {"titles": 0.167},
        "after": {"titles": 0.293},
        "stages": {"fitting": {"titles": 0.279}},
    }
    facts["stages"]["training"] = facts["after"]
    (index / "model").mkdir()
    (index / "model" / "hce.json").write_text(json.dumps(facts))
    line = "trained    fitting 0.1670 → 0.2790, training → 0.2930 (NDCG@10)"
    assert line in run("status", index, "--no-drift").out
    told = json.loads(run("status", index, "--no-drift", "--json").out)["training"]
    assert told == {name: facts[name] for name in ("metric", "before", "after", "stages")}


def test_status_says_nothing_of_fitting_where_no_table_was(run, index):
    assert "fitted" not in run("status", index).out
    assert json.loads(run("status", index, "--json").out)["fitted_documents"] is None


def test_indexing_german_with_an_english_encoder_says_so_once(run, tmp_path, monkeypatch, caplog):
    text = "Die Katze schläft nicht, und der Hund ist auf dem Sofa, das in der Küche mit den Stühlen steht."
    documents = [Document(str(number), f"{text} {number}") for number in range(20)]
    monkeypatch.setenv("HCE_CACHE", str(tmp_path / "cache"))
    small_static(tmp_path / "cache", [document.text for document in documents])
    (tmp_path / "german.jsonl").write_text("\n".join(document.to_json() for document in documents))
    assert run("index", tmp_path / "german.jsonl", "-o", tmp_path / "index").code == 0
    (line,) = [line for line in caplog.messages if "seem to be in German" in line]
    assert "--language german" in line
