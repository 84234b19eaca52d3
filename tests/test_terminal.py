"""What is printed is shown and never obeyed: escapes of documents, of names and of files, on both streams."""

from __future__ import annotations

import io
import json
import logging
import os
import sys

import pytest
from rich.table import Table
from rich.text import Text

from hce import cli
from hce.commands.common import OBEYED, PlainConsole, harmless, print_json
from hce.data.text import Document
from hce.index.index import Index

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x08\r\u202etxt.exe\u2066"
CONTROL = [character for character in map(chr, range(0x20)) if character not in "\t\n"]


def run(*arguments):
    """Run the command line in this process; return its exit code."""
    before = sys.argv
    sys.argv = ["hce", *map(str, arguments)]
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code or 0
    finally:
        sys.argv = before
    return 0


@pytest.mark.parametrize("character", [*CONTROL, "\x7f", *map(chr, range(0x80, 0xA0)), "\u202e", "\ud800", "\udcff"])
def test_no_character_that_is_obeyed_is_left(character):
    assert harmless(f"a{character}b") == "a\ufffdb"


def test_texts_of_all_scripts_stay_as_they_are():
    text = "naïve\t日本語\nעברית\u200f 👩‍🔬 €"
    assert harmless(text) == text


def test_every_way_of_printing_is_harmless(capfd):
    console, table = PlainConsole(), Table(EVIL)
    table.add_row(EVIL, EVIL)
    console.print(f"line {EVIL}", soft_wrap=True)
    console.print(Text(EVIL, style="bold").append(EVIL))
    console.print(table)
    console.print("[/nothing] [bold]kept[/] :smile:", "[red]", style="red")
    print_json({"text": EVIL, EVIL: ["\ud800", "é"]})
    shown = capfd.readouterr().out
    assert OBEYED.search(shown) is None
    assert "[/nothing] [bold]kept[/] :smile: [red]" in shown  # and nothing is taken for markup
    assert json.loads(shown.splitlines()[-1]) == {"text": EVIL, EVIL: ["\ud800", "é"]}


def test_styles_are_still_there(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = PlainConsole()
    console.file = io.StringIO()
    console.print(Text(EVIL, style="bold"))
    assert console.file.getvalue().startswith("\x1b[1m\ufffd]0;owned\ufffd[2J")
    assert console.file.getvalue().count("\x1b") == 2


@pytest.fixture
def evil_index(tmp_path, static_encoder):
    documents = [
        Document(f"star{EVIL}", f"star {EVIL} red", title=f"star {EVIL}", metadata={EVIL: EVIL}),
        Document("long", " ".join(["star red w1", EVIL] * 300), title="[/x] :smile:"),
        Document("[bold]", "[/bold] star [red]"),
    ]
    with Index.create(tmp_path / "index", documents, static_encoder, "grow"):
        pass
    return tmp_path / "index"


@pytest.mark.parametrize(
    "arguments",
    [
        ("search", "{index}", "star red"),
        ("search", "{index}", "star red", "--mode", "words"),
        ("search", "{index}", "star red", "--json"),
        ("status", "{index}"),
        ("tree", "{index}"),
        ("tree", "{index}", "--json"),
        ("remove", "{index}", "star\x1b[2J"),
        ("search", "{index}", "star", "--where", "\x1b[2J"),
    ],
)
def test_commands_that_print_what_documents_hold(evil_index, arguments, capfd):
    run(*(argument.format(index=evil_index) for argument in arguments))
    shown = capfd.readouterr()
    assert shown.out + shown.err
    assert OBEYED.search(shown.out + shown.err) is None
    assert "Traceback" not in shown.err


def test_log_lines_that_quote_names_of_files(tmp_path, capfd):
    folder = tmp_path / "evil\x1b[2J"
    folder.mkdir()
    (folder / "docs.jsonl").write_text('{"_id": "a", "text": ""}\n{"_id": "b", "text": "star"}\n')
    logging.getLogger().handlers.clear()  # pytest's own, which keep the command line's away
    try:
        run("index", folder / "docs.jsonl", "-o", tmp_path / "out", "-m", tmp_path / "nothing")
    finally:
        logging.getLogger().handlers.clear()
    shown = capfd.readouterr().err
    assert "left out 1 documents" in shown
    assert OBEYED.search(shown) is None


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes there")
@pytest.mark.parametrize("command", ["search", "index", "remove", "train", "tree"])
def test_arguments_that_are_no_utf_8_are_one_line(command, capfd):
    assert run(command, os.fsdecode(b"caf\xe9"), "-o", "x") == 1
    shown = capfd.readouterr()
    assert shown.err == "error: argument 2, 'caf\\\\xe9', is not UTF-8; convert the text or rename the file\n"
