"""Kill -9 at random moments: what an index acknowledged must be there afterwards, and nothing half-done.

    python benchmarks/crash.py [--trials 300] [--seed 0] [--engine flat]

Each trial forks a process that makes random changes to an index (add, update, remove, rebuild; in every tenth trial it
makes the index itself), says on a pipe what it is about to do, and says so again when the call has returned. It is
killed at a random moment. Then the index is opened: its documents must be those of all acknowledged changes, with or
without the one under way, whole; every vector must be its text's, searching by meaning must find what exact search
finds, and searching by words just the documents that have them.
"""

from __future__ import annotations

import os

# A process with threads is not one to fork.
os.environ["OMP_NUM_THREADS"] = os.environ["RAYON_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

from hce.data.documents import Document
from hce.encoding.encoder import Encoder
from hce.index import live
from hce.index.index import Index

WORDS = 60
LONGEST, LONGEST_CREATING = 0.4, 0.6  # seconds that a process may live after its first word
TRIALS_AN_INDEX = 10
Contents = dict[str, tuple[str, int]]
"""What should be in the index: id → text, and the number in its metadata."""


def tiny_encoder() -> Encoder:
    """A random token table."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)} | {"[UNK]": WORDS}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    table = np.random.default_rng(0).normal(size=(WORDS + 1, 16)).astype(np.float32)
    modules = [StaticEmbedding(tokenizer, embedding_weights=table), Normalize()]
    device = torch.device("cpu")
    return Encoder(SentenceTransformer(modules=modules, device="cpu"), "tiny", device=device, dtype=torch.float32)


def documents_of(contents: Contents) -> list[Document]:
    """As documents."""
    return [Document(doc_id, text, metadata={"n": n}) for doc_id, (text, n) in contents.items()]


def random_contents(rng: random.Random, ids: list[str]) -> Contents:
    """Texts of a few words, some of them equal."""
    return {
        doc_id: (" ".join(f"w{rng.randrange(WORDS)}" for _ in range(rng.choice((1, 6)))), rng.randrange(100))
        for doc_id in ids
    }


def random_change(rng: random.Random, contents: Contents) -> dict[str, Any]:
    """What to do next."""
    present = sorted(contents)
    kind = rng.choices(("add", "update", "remove", "rebuild"), weights=(5, 3, 4, 1))[0]
    count = rng.choice((1, 3, 40))
    some = rng.sample(present, min(count, len(present)))
    if kind == "add":
        free = [doc_id for doc_id in (f"d{i}" for i in range(400)) if doc_id not in contents]
        return {"kind": kind, "documents": random_contents(rng, rng.sample(free, min(count, len(free))))}
    if kind == "update":
        return {"kind": kind, "documents": random_contents(rng, [*some, f"d{rng.randrange(400)}"])}
    return {"kind": kind, "ids": some if kind == "remove" else []}


def after(contents: Contents, change: dict[str, Any]) -> Contents:
    """What should be there once a change is made."""
    written = {doc_id: tuple(value) for doc_id, value in change.get("documents", {}).items()}
    return {doc_id: value for doc_id, value in {**contents, **written}.items() if doc_id not in change.get("ids", ())}


def work(path: Path, encoder: Encoder, contents: Contents, seed: int, engine: str, say: int) -> None:
    """The life of a process that will be killed."""
    rng = random.Random(seed)  # noqa: S311
    live.ROWS_BEHIND = 20  # snapshots often, so that they are under way when the end comes
    if not path.exists():
        contents = random_contents(rng, [f"d{i}" for i in range(60)])
        _say(say, {"kind": "create", "documents": contents})
        Index.create(path, documents_of(contents), encoder, "grow", engine=engine).close()
        _say(say, "done")
    index = Index.open(path, encoder)
    _say(say, "ready")
    while True:
        change = random_change(rng, contents)
        _say(say, change)
        if change["kind"] == "rebuild":
            index.rebuild()
        elif change["kind"] == "remove":
            index.remove(change["ids"])
        else:
            getattr(index, change["kind"])(documents_of(change["documents"]))
        _say(say, "done")
        contents = after(contents, change)
        if rng.random() < 0.3 and contents:
            index.search("w1 w2", k=3)


def _say(pipe: int, message: Any) -> None:
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(pipe, data) :]


def run_and_kill(path: Path, encoder: Encoder, contents: Contents, seed: int, engine: str) -> list[Any]:
    """One process from birth to its violent end; what it said, whole lines only."""
    rng = random.Random(seed)  # noqa: S311
    longest = LONGEST if path.exists() else LONGEST_CREATING
    listen, say = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(listen)
        try:
            work(path, encoder, contents, seed, engine, say)
        except BaseException as error:
            _say(say, {"kind": "failed", "error": repr(error)})
        finally:
            os._exit(1)
    os.close(say)
    heard = os.read(listen, 1)
    time.sleep(rng.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(listen, "rb") as pipe:
        heard += pipe.read()
    return [json.loads(line) for line in heard.split(b"\n")[:-1]]


def split(said: list[Any], contents: Contents) -> tuple[Contents, dict[str, Any] | None, Counter[str]]:
    """The contents by all that was acknowledged, the change that was not, and how many of each kind were."""
    waiting, done = None, Counter[str]()
    for message in said:
        if isinstance(message, dict):
            if message["kind"] == "failed":
                raise SystemExit(f"a process failed by itself: {message['error']}")
            waiting = message
        elif message == "done" and waiting is not None:
            contents = after({} if waiting["kind"] == "create" else contents, waiting)
            done[waiting["kind"]] += 1
            waiting = None
    return contents, waiting, done


def missed(index: Index, contents: Contents) -> list[str]:
    """Some words by which other documents are found than have them."""

    def having(word: str) -> set[str]:
        return {doc_id for doc_id, (text, _) in contents.items() if word in text.split()}

    words = ("w1", "w7", f"w{WORDS - 1}")
    found = {word: {hit.id for hit in index.search(word, max(1, len(contents)), mode="words")} for word in words}
    return [word for word in words if found[word] != having(word)]


def faults(path: Path, encoder: Encoder, allowed: list[Contents]) -> tuple[list[str], Contents]:
    """What is wrong with the index after a crash, and what is in it."""
    try:
        index = Index.open(path, encoder)
    except Exception as error:
        return [f"cannot be opened: {error}"], {}
    with index:
        found = {each.id: (each.text, each.metadata["n"]) for each in index}
        wrong = []
        if found not in allowed:
            lost = {key: value for key, value in allowed[0].items() if found.get(key) != value}
            wrong.append(f"other documents than acknowledged ({len(found)}, not {len(allowed[0])}; e.g. {lost})"[:300])
        if len(index) != len(found):
            wrong.append(f"counts {len(index)} documents and holds {len(found)}")
        entries = list(index.entries())
        if entries:
            vectors = np.stack([entry.vector for entry in entries])
            if not np.allclose(vectors, encoder.encode([entry.document.full_text for entry in entries]), atol=1e-6):
                wrong.append("a vector is not its text's")
            query = encoder.encode(["w1 w2 w3"], "query")
            best = np.sort(query @ vectors.T)[0, ::-1][:5]
            # Under a condition, which all fulfil here, any engine is exact.
            scores = [hit.score for hit in index.search("w1 w2 w3", 5, {"n": {"gte": 0}}, "dense")]
            if not np.allclose(scores, best, atol=1e-5):
                wrong.append("searching does not find what exact search finds")
        wrong += [f"searching by words does not find the documents that have {word}" for word in missed(index, found)]
        tree = index.tree
        if tree is not None and len(tree.numbers) != len(tree.hierarchy):
            wrong.append("the tree is damaged")
    with sqlite3.connect(path / "documents.sqlite") as database:
        verdict = database.execute("PRAGMA integrity_check").fetchone()[0]
        if verdict != "ok":
            wrong.append(f"SQLite: {verdict}")
    return wrong, found


def main() -> None:
    """Run the trials; exit code 1 if anything was lost, halved or unreadable."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", default="flat")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    encoder = tiny_encoder()
    folder = Path(tempfile.mkdtemp(prefix="hce-crash-"))
    path, contents = folder / "index", {}
    totals, killed_in, bad = Counter[str](), Counter[str](), 0
    for trial in range(arguments.trials):
        if trial % TRIALS_AN_INDEX == 0:
            shutil.rmtree(path, ignore_errors=True)
        said = run_and_kill(path, encoder, contents, arguments.seed + trial, arguments.engine)
        contents, waiting, done = split(said, contents)
        totals += done
        killed_in[waiting["kind"] if waiting else "between"] += 1
        if not path.exists():
            if not waiting or waiting["kind"] != "create":
                raise SystemExit(f"trial {trial}: the index is gone")
            contents = {}
            continue
        allowed = [contents] + ([after({} if waiting["kind"] == "create" else contents, waiting)] if waiting else [])
        wrong, contents = faults(path, encoder, allowed)
        for fault in wrong:
            bad += 1
            print(f"trial {trial}: {fault}")
    shutil.rmtree(folder, ignore_errors=True)
    shown = ", ".join(f"{count} {kind}" for kind, count in totals.most_common())
    print(f"{arguments.trials} kills; acknowledged before them: {shown}")
    print("killed during: " + ", ".join(f"{kind} {count}" for kind, count in killed_in.most_common()))
    print(f"lost, halved or unopenable: {bad}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
