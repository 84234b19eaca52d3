"""Progress is for people: nothing on stdout, nothing when silenced, plain lines where no terminal is."""

import io
import sys
import time

import pytest

from hce import progress
from hce.progress import bars_shown, counted, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Time that passes only when told to."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_silent_when_not_shown(capfd, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with progress_bar("encoding", 10, "texts", show=False) as advance:
        advance(10)
    assert capfd.readouterr() == ("", "")


def test_plain_lines_on_stderr_without_a_terminal(capfd, monkeypatch, clock):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with progress_bar("encoding", 2000, "texts", show=True) as advance:
        clock.now += 2
        advance(500)
        clock.now += 6
        advance(1500)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "encoding: 500/2,000 texts, 250 texts/s, 6 s left",
        "encoding: 2,000/2,000 texts, 250 texts/s, 0 s left",
    ]


def test_a_line_after_two_seconds_then_every_ten_and_one_at_the_end(capfd, clock):
    with progress_bar("encoding", 30, "texts", show=True) as advance:
        for _ in range(30):
            clock.now += 0.5
            advance(1)
    assert [line.split(",")[0] for line in capfd.readouterr().err.splitlines()] == [
        "encoding: 4/30 texts",
        "encoding: 24/30 texts",
        "encoding: 30/30 texts",
    ]


def test_no_more_is_done_than_there_is(capfd, monkeypatch, clock):
    with progress_bar("epoch 1/2", 27_408, "pairs", show=True) as advance:
        clock.now += 20
        advance(27_000)
        clock.now += 20
        advance(409)  # the last batch has one more than was left
        clock.now += 20
        advance(5)
    assert capfd.readouterr().err.splitlines() == [
        "epoch 1/2: 27,000/27,408 pairs, 1,350 pairs/s, 0 s left",
        "epoch 1/2: 27,408/27,408 pairs, 685 pairs/s, 0 s left",
        "epoch 1/2: 27,408/27,408 pairs, 457 pairs/s, 0 s left",
    ]


def test_no_more_is_done_than_there_is_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar("encoding", 4, "texts", show=True) as advance:
        advance(3)
        advance(3)
    assert "4/4" in terminal.getvalue()
    assert "6/4" not in terminal.getvalue()


def test_short_work_says_nothing(capfd):
    with progress_bar("encoding", 3, "texts", show=True) as advance:
        advance(3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("total", [0, 5])
def test_no_time_and_no_items_divide_by_nothing(capfd, monkeypatch, clock, total):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    with progress_bar("x", total, "items", show=True) as advance:
        advance(0)
        advance(total)
    assert len(capfd.readouterr().err.splitlines()) == 2


def test_a_bar_on_a_terminal(capfd, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress_bar("encoding", 4, "texts", show=True) as advance:
        advance(1)
        advance(3)
    assert "encoding" in terminal.getvalue()
    assert "4/4" in terminal.getvalue()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("make", [io.StringIO, Terminal])
def test_an_exception_passes_through(monkeypatch, make):
    monkeypatch.setattr(sys, "stderr", make())
    with pytest.raises(KeyboardInterrupt), progress_bar("x", 2, "items", show=True) as advance:
        advance(1)
        raise KeyboardInterrupt


def test_work_without_a_known_end_tells_how_much_is_done_and_how_fast(capfd, clock):
    with progress_bar("reading", None, "documents", show=True) as advance:
        clock.now += 4
        assert list(counted("ab", advance)) == ["a", "b"]
    assert capfd.readouterr().err.splitlines() == ["reading: 1 documents, 0 documents/s"]


def test_deep_work_is_shown_where_someone_asked_for_it(capfd, clock):
    def deep(**show):
        with progress_bar("building", 2, "vectors", **show) as advance:
            clock.now += 4
            advance(1)
        return len(capfd.readouterr().err.splitlines())

    assert deep() == 0
    with bars_shown():
        assert (deep(), deep(show=False), deep(show=True)) == (1, 0, 1)
        with bars_shown(False):
            assert deep() == 0
    assert deep() == 0


def test_work_that_tells_nothing_yet_is_told_of(capfd, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_TO_FIRST_LINE", 0.01)
    with progress_bar("growing the tree", 10, "vectors", show=True):
        for _ in range(500):
            if err := capfd.readouterr().err:
                break
            time.sleep(0.01)
    assert err == "growing the tree: for 0 s\n"


def test_of_two_bars_on_a_terminal_the_outer_is_shown(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    for _ in range(2):
        with progress_bar("outer", 4, "texts", show=True) as advance:
            with progress_bar("inner", 4, "texts", show=True) as inner:
                inner(4)
            advance(4)
    assert "outer" in terminal.getvalue()
    assert "inner" not in terminal.getvalue()
