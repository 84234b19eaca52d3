"""The demo's collection: read with `ast`, summaries held out of the documents they ask for."""

from __future__ import annotations

from hce.demo import python_docstrings

MODULE = '''"""Tools for counting sheep at night.

They count forwards and backwards, and they fall asleep long before any of the sheep has made
up its mind to jump."""

raise SystemExit("must never be run")

class Sheep:
    """A woolly animal that jumps.

    Jumping takes place over fences of every height that is known to the farmer,
    who keeps the list of them in the barn.
    """

    def jump(self):
        """Too short."""
'''


def test_summaries_are_queries_and_the_rest_documents(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text(MODULE)
    corpus, queries, qrels = python_docstrings(tmp_path)
    assert corpus.ids == ["pkg", "pkg.Sheep"]
    assert queries["? pkg.Sheep"].text == "A woolly animal that jumps."
    assert corpus[1].text.startswith("Jumping takes place")
    assert "woolly" not in corpus[1].full_text
    assert dict(qrels["? pkg"]) == {"pkg": 1}


def test_this_python_has_enough_of_them():
    dataset = python_docstrings()
    assert 1000 < len(dataset.corpus) < 6000
    assert len(dataset.queries) == len(dataset.corpus) == len(dataset.qrels)
