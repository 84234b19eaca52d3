"""Deadlines: work ends at its next look once nobody waits, in its own thread too."""

from __future__ import annotations

import time
from contextvars import copy_context
from threading import Thread

import pytest

from hce.data.documents import Document
from hce.deadline import Deadline, DeadlineError, check
from hce.index.index import Index
from hce.search import words as words_module
from hce.search.words import Words


def test_without_a_deadline_work_goes_on():
    check()
    with Deadline(60).around():
        check()
    with pytest.raises(DeadlineError), Deadline(-1).around():
        check()
    check()


def test_it_is_called_off_from_another_thread():
    deadline, looks, ended = Deadline(60), [], []

    def work():
        try:
            while True:
                looks.append(check())
                time.sleep(0.001)
        except DeadlineError:
            ended.append(True)

    with deadline.around():
        thread = Thread(target=copy_context().run, args=(work,))
    thread.start()
    while not looks:
        time.sleep(0.001)
    deadline.call_off()
    thread.join(5)
    assert ended == [True]


def test_telling_shared_words_looks_before_each_text(monkeypatch):
    index, deadline, read = Words.new(), Deadline(60), []

    def terms(text, language):
        read.append(text)
        if len(read) == 4:  # the query's one word, then texts
            deadline.call_off()
        return [text]

    monkeypatch.setattr(words_module, "terms", terms)
    with deadline.around(), pytest.raises(DeadlineError):
        index.matched("ship", ["a ship"] * 1000)
    assert len(read) == 4


def test_a_search_that_nobody_waits_for_does_not_begin(tmp_path, planted_corpus, static_encoder):
    with Index.create(tmp_path / "index", planted_corpus, static_encoder) as index:
        index.add([Document("x", "star")])
        with Deadline(-1).around(), pytest.raises(DeadlineError):
            index.search("star")
        assert index.search("star")  # and nothing is left locked
