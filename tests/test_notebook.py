"""The notebook of the first hour runs from its first cell to its last, and prints what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebook wants nbformat and nbclient")
nbclient = pytest.importorskip("nbclient", reason="the notebook wants nbformat and nbclient")

NOTEBOOK = Path(__file__).parent.parent / "docs" / "first-hour.ipynb"


def printed(cell) -> str:
    streams = (
        output for output in cell.get("outputs", ()) if output.output_type == "stream" and output.name == "stdout"
    )
    return "".join(output.text for output in streams)


def test_every_cell_runs(tmp_path):
    shown = nbformat.read(NOTEBOOK, as_version=4)
    run = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(run, timeout=300, kernel_name="python3").execute(cwd=tmp_path)
    code = [index for index, cell in enumerate(run.cells) if cell.cell_type == "code"]
    assert [run.cells[index].execution_count for index in code] == list(range(1, len(code) + 1))
    for index in code:  # figures differ from one library and machine to the next; what is printed does not
        assert bool(printed(run.cells[index])) == bool(printed(shown.cells[index])), run.cells[index].source
    everything = "".join(printed(cell) for cell in run.cells)
    assert "['note-1']" in everything
    assert "['note-2']" in everything
