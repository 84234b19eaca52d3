"""The vectors of a corpus: the same in memory and on disk, by one process or two, and after any crash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hce.data.corpus import Corpus
from hce.data.text import Document
from hce.encoding import corpus_vectors
from hce.encoding.corpus_vectors import VectorFile, encode_corpus
from hce.encoding.encoder import Encoder
from hce.errors import HceError, InputError


def tiny_corpus(count: int = 23) -> Corpus:
    return Corpus.from_documents(Document(f"d{i}", f"star w{i} w{(7 * i) % 100}") for i in range(count))


def file_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "vectors.npy").read_bytes()).hexdigest()


def test_a_folder_holds_the_vectors_of_encode(static_encoder, tmp_path):
    corpus = tiny_corpus()
    vectors = encode_corpus(static_encoder, corpus, tmp_path / "v", chunk_size=5)
    np.testing.assert_allclose(vectors, static_encoder.encode(list(corpus.texts())), atol=1e-6)
    assert isinstance(vectors, np.memmap)
    assert sorted(path.name for path in (tmp_path / "v").iterdir()) == ["manifest.json", "vectors.npy"]


def test_memory_holds_the_same(static_encoder, monkeypatch, capfd):
    monkeypatch.setattr(corpus_vectors, "TEXTS_AT_ONCE", 7)
    monkeypatch.setattr("hce.progress.SECONDS_BETWEEN_LINES", 0.0)
    corpus = tiny_corpus()
    vectors = encode_corpus(static_encoder, corpus, progress=True)
    np.testing.assert_allclose(vectors, static_encoder.encode(list(corpus.texts())), atol=1e-6)
    assert "encoding: 23/23 documents" in capfd.readouterr().err


class StopError(Exception):
    """Stands for a crash."""


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stops=st.lists(st.integers(0, 4), max_size=4))
def test_it_continues_to_the_same_bytes(static_encoder, tmp_path_factory, stops):
    corpus, encode = tiny_corpus(), Encoder.encode
    whole, broken = tmp_path_factory.mktemp("whole") / "v", tmp_path_factory.mktemp("broken") / "v"
    encode_corpus(static_encoder, corpus, whole, chunk_size=5)
    encoded = 0
    for stop in stops:
        calls = 0

        def failing(self, texts, *args, limit=stop, **options):
            nonlocal calls
            calls += 1
            if calls > limit:
                raise StopError
            return encode(self, texts, *args, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Encoder, "encode", failing)
            try:
                encode_corpus(static_encoder, corpus, broken, chunk_size=5)
                encoded += calls
            except StopError:
                encoded += calls - 1
    with pytest.MonkeyPatch.context() as patch:
        counted = []
        patch.setattr(Encoder, "encode", lambda self, texts, *a, **o: counted.append(1) or encode(self, texts, *a, **o))
        encode_corpus(static_encoder, corpus, broken, chunk_size=5)
    assert file_hash(broken) == file_hash(whole)
    assert len(counted) == 5 - encoded  # nothing was encoded twice


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rounds=st.integers(1, 5), which=st.integers(0, 1), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7)
)
def test_no_flipped_bit_is_taken_over(static_encoder, tmp_path_factory, rounds, which, place, bit):
    """Whatever is flipped in work that is continued: the vectors are right, or an error says that it is other work."""
    corpus, encode = tiny_corpus(), Encoder.encode
    whole, broken = tmp_path_factory.mktemp("whole") / "v", tmp_path_factory.mktemp("broken") / "v"
    encode_corpus(static_encoder, corpus, whole, chunk_size=5)
    calls = []

    def failing(self, texts, *args, **options):
        calls.append(1)
        if len(calls) > rounds:
            raise StopError
        return encode(self, texts, *args, **options)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(StopError):
        patch.setattr(Encoder, "encode", failing)
        encode_corpus(static_encoder, corpus, broken, chunk_size=5)
    path = sorted(broken.iterdir())[which]
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    try:
        encode_corpus(static_encoder, corpus, broken, chunk_size=5)
    except HceError as error:
        assert path.suffix == ".json", error
    else:
        assert file_hash(broken) == file_hash(whole)


def test_vectors_that_were_damaged_are_encoded_anew_and_no_others(static_encoder, tmp_path, monkeypatch, caplog):
    encode_corpus(static_encoder, tiny_corpus(), tmp_path / "v", chunk_size=5)
    before, encode, encoded = file_hash(tmp_path / "v"), Encoder.encode, []
    with (tmp_path / "v" / "vectors.npy").open("r+b") as file:
        file.seek(-10 * 32 * 4, os.SEEK_END)  # row 13, in the third block
        file.write(b"\0")
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: encoded.append(len(texts)) or encode(self, texts))
    encode_corpus(static_encoder, tiny_corpus(), tmp_path / "v", chunk_size=5)
    assert file_hash(tmp_path / "v") == before
    assert encoded == [5, 5, 3]
    assert "vectors after row 10 were damaged, and are encoded again" in caplog.text


def test_it_refuses_vectors_of_another_encoder_or_corpus(static_encoder, tmp_path):
    encode_corpus(static_encoder, tiny_corpus(), tmp_path / "v")
    with pytest.raises(InputError, match=r"holds vectors with rows 23, not 22"):
        encode_corpus(static_encoder, tiny_corpus(22), tmp_path / "v")
    before = file_hash(tmp_path / "v")
    with torch.no_grad():
        static_encoder.model[0].embedding.weight[0, 0] += 1e-3
    with pytest.raises(InputError, match="holds vectors with encoder"):
        encode_corpus(static_encoder, tiny_corpus(), tmp_path / "v")
    assert file_hash(tmp_path / "v") == before
    replaced = encode_corpus(static_encoder, tiny_corpus(), tmp_path / "v", replace=True)
    np.testing.assert_array_equal(replaced, encode_corpus(static_encoder, tiny_corpus()))


def test_it_refuses_a_folder_with_other_files(static_encoder, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="holds other files"):
        encode_corpus(static_encoder, tiny_corpus(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


# ------------------------------------------------------------------------------------------------- kill -9, processes


def encode_as_member(folder: Path, rank: int, count: int, meet: Path, rounds: int | None) -> None:
    """Encode as one of `count` processes; the first of them dies after so many rounds, and all with it."""
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=count)
    encoder, encode, encoded, done = Encoder.load(folder / "encoder", device="cpu"), Encoder.encode, [], 0
    acknowledge = VectorFile.acknowledge

    def acknowledge_or_die(self: VectorFile, safe: int) -> None:
        nonlocal done
        if rank == 0 and done == rounds:
            with self.path.open("ab") as file:
                file.write(b"half a chunk")  # what a kill in the middle of a write leaves behind
            os.kill(os.getpid(), signal.SIGKILL)
        done += 1
        acknowledge(self, safe)

    VectorFile.acknowledge = acknowledge_or_die
    Encoder.encode = lambda self, texts, *a, **o: encoded.extend(texts) or encode(self, texts, *a, **o)
    vectors = encode_corpus(encoder, Corpus.load(folder / "docs.jsonl"), folder / "v", chunk_size=5)
    result = {"sum": float(vectors.astype(np.float64).sum()), "encoded": encoded}
    (folder / f"result-{rank}.json").write_text(json.dumps(result))


def encode_by(context, folder: Path, count: int, rounds: int | None = None) -> list[dict]:
    """Let so many processes encode into one folder, to the end or until they are killed; returns what each says."""
    meet = folder / f"meet-{count}-{rounds}"
    members = [
        context.Process(target=encode_as_member, args=(folder, rank, count, meet, rounds)) for rank in range(count)
    ]
    for each in members:
        each.start()
    members[0].join(timeout=240)
    assert members[0].exitcode == (0 if rounds is None else -signal.SIGKILL)
    for each in members[1:]:
        if rounds is not None:
            each.kill()  # as a launcher does
        each.join(timeout=240)
    return [] if rounds is not None else [json.loads((folder / f"result-{r}.json").read_text()) for r in range(count)]


@pytest.fixture
def folder(tmp_path, static_encoder) -> Path:
    """A corpus and an encoder on disk, and the vectors that one uninterrupted process writes."""
    (tmp_path / "docs.jsonl").write_text("\n".join(document.to_json() for document in tiny_corpus()))
    static_encoder.save(tmp_path / "encoder")
    encoder = Encoder.load(tmp_path / "encoder", device="cpu")
    encode_corpus(encoder, Corpus.load(tmp_path / "docs.jsonl"), tmp_path / "whole", chunk_size=5)
    return tmp_path


def test_two_processes_write_the_file_of_one(forkserver, folder):
    first, second = encode_by(forkserver, folder, 2)
    assert file_hash(folder / "v") == file_hash(folder / "whole")
    assert sorted(path.name for path in (folder / "v").iterdir()) == ["manifest.json", "vectors.npy"]
    assert first["sum"] == second["sum"]
    texts = list(tiny_corpus().texts())
    assert first["encoded"] == texts[:5] + texts[10:15] + texts[20:]
    assert second["encoded"] == texts[5:10] + texts[15:20]


@pytest.mark.parametrize(("before", "rounds", "after"), [(1, 0, 1), (2, 1, 2), (1, 2, 2)])
def test_killed_and_continued_it_is_the_file_of_one(forkserver, folder, before, rounds, after):
    encode_by(forkserver, folder, before, rounds)
    safe = rounds * before * 5
    assert json.loads((folder / "v" / "manifest.json").read_text())["done"] == safe
    said = encode_by(forkserver, folder, after)
    assert file_hash(folder / "v") == file_hash(folder / "whole")
    assert sorted(text for each in said for text in each["encoded"]) == sorted(list(tiny_corpus().texts())[safe:])
