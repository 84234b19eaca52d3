"""Site: an index and all that its page shows of it, for as long as the server runs."""

from __future__ import annotations

import os

from hce.index.index import Index
from hce.web.drift_watch import DriftWatch
from hce.web.lanes import Lane
from hce.web.limits import SEARCHES_WAITING, WRITES_WAITING
from hce.web.live_tree import LiveTree
from hce.web.rules import Rules
from hce.web.together import Together
from hce.web.training_facts import read_training
from hce.web.untrained import Untrained


class Site:
    """The parts that requests are answered from.

    Attributes:
        index: the index.
        rules: who may ask for what.
        tree: its tree with the documents of now.
        untrained: the ranking to compare with.
        drift: whether it is time to retrain.
        training: what is known of the encoder's training.
        queries: what encodes queries.
        searches: the threads that search; more than there are cores would only get into each other's way.
        writes: the one that writes, since a store takes one write at a time.
        looks: those for everything else, which a full queue of searches does not keep waiting.
    """

    def __init__(self, index: Index, rules: Rules) -> None:
        self.index = index
        self.rules = rules
        self.tree = LiveTree(index)
        self.untrained = Untrained(index)
        self.drift = DriftWatch(index)
        self.training = read_training(index.path)
        self.queries = Together(index.encode_queries, SEARCHES_WAITING)
        self.searches = Lane(max(2, os.cpu_count() or 2), SEARCHES_WAITING)
        self.writes = Lane(1, WRITES_WAITING)
        self.looks = Lane(4, SEARCHES_WAITING)

    def start(self) -> None:
        """Begin what is done in the background."""
        self.untrained.start()

    def stop(self) -> None:
        """End it."""
        self.untrained.stop()
        self.drift.stop()
