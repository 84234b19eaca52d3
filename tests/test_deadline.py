"""Deadlines: work ends at its next look once nobody waits, in its own thread too."""

from __future__ import annotations

import time
from contextvars import copy_context
from threading import Thread, Timer

import numpy as np
import pytest

from hce.data.text import Document
from hce.index.index import Index
from hce.index.store import Store
from hce.progress import Deadline, DeadlineError, check_deadline
from hce.search.words import Words


def test_without_a_deadline_work_goes_on():
    check_deadline()
    with Deadline(60).around():
        check_deadline()
    with pytest.raises(DeadlineError), Deadline(-1).around():
        check_deadline()
    check_deadline()


def test_it_is_called_off_from_another_thread():
    deadline, looks, ended = Deadline(60), [], []

    def work():
        try:
            while True:
                looks.append(check_deadline())
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


def test_telling_shared_words_looks_before_each_word(monkeypatch):
    index, deadline, asked = Words.new(), Deadline(60), []
    index.add((number, "a ship") for number in range(1, 9))

    def having(word, numbers):
        asked.append(word)
        if len(asked) == 3:
            deadline.call_off()
        return numbers

    monkeypatch.setattr(index, "_having", having)
    with deadline.around(), pytest.raises(DeadlineError):
        index.matched(" ".join(f"w{place}" for place in range(50)), range(1, 9))
    assert len(asked) == 3


def test_sql_over_all_metadata_is_broken_off(tmp_path):
    """One statement over many rows holds its thread no longer than someone waits for it."""
    metadata = {"tags": [str(tag) for tag in range(300)]}
    store = Store.create(tmp_path, 1)
    with store.writing() as writer:
        writer.insert([Document(str(place), "t", "", metadata) for place in range(3000)], np.ones((3000, 1)))
    conditions = {"tags": "none of them"}
    with store.reading() as reader:
        start = time.perf_counter()
        assert not len(reader.numbers_where(conditions))
        whole = time.perf_counter() - start
    deadline = Deadline(60)
    Timer(whole / 10, deadline.call_off).start()
    start = time.perf_counter()
    with deadline.around(), pytest.raises(DeadlineError), store.reading() as reader:
        reader.numbers_where(conditions)
    assert time.perf_counter() - start < whole * 0.7
    with store.reading() as reader:  # and the connection goes on to serve others
        assert len(reader.numbers_where({"tags": "7"})) == 3000


def test_a_write_is_not_broken_off(tmp_path):
    store = Store.create(tmp_path, 1)
    with Deadline(-1).around(), store.writing() as writer:
        writer.insert([Document(str(place), "t") for place in range(3000)], np.ones((3000, 1)))
    with store.reading() as reader:
        assert reader.moment().documents == 3000


def test_a_search_that_nobody_waits_for_does_not_begin(tmp_path, planted_corpus, static_encoder):
    with Index.create(tmp_path / "index", planted_corpus, static_encoder) as index:
        index.add([Document("x", "star")])
        with Deadline(-1).around(), pytest.raises(DeadlineError):
            index.search("star")
        assert index.search("star")  # and nothing is left locked
