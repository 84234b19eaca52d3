"""`hce push`, against a small hub on this machine: what is sent, and what is never said."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import hce
from hce.encoding.encoder import Encoder
from hce.errors import FormatError, OutsideError
from hce.files import damage_in
from hce.training.model_folder import ModelFolder, uploads_of

TOKEN = "hf_verysecrettoken"  # noqa: S105


class Hub:
    """A model hub that takes one commit: large files by LFS, the others within it."""

    def __init__(self) -> None:
        self.files, self.objects, self.created, self.tokens, self.status = {}, {}, [], set(), 200

    def answer(self, method, path, body, token):
        self.tokens.add(token)
        if self.status != 200:
            return self.status, {"error": f"refused, with the token {token}"}
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/org/my-model"}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            modes = ["lfs" if each["path"].endswith(".safetensors") else "regular" for each in files]
            return 200, {
                "files": [
                    {"path": e["path"], "uploadMode": m, "shouldIgnore": False}
                    for e, m in zip(files, modes, strict=True)
                ]
            }
        if path.endswith("/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [{**e, "actions": {"upload": {"href": f"{self.url}/put/{e['oid']}"}}} for e in objects]
            return 200, {"transfer": "basic", "objects": actions}
        if path.startswith("/put/"):
            self.objects[path.removeprefix("/put/")] = body
            return 200, {}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                self.take(line["key"], line["value"])
            return 200, {"commitUrl": f"{self.url}/org/my-model/commit/0", "commitOid": "0" * 40, "success": True}
        return 200, {"id": "x", "sha": "0" * 40}

    def take(self, kind, value):
        if kind == "file":
            self.files[value["path"]] = base64.b64decode(value["content"])
        elif kind == "lfsFile":
            self.files[value["path"]] = self.objects[value["oid"]]


@pytest.fixture
def hub():
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do(self):
            if self.headers.get("transfer-encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            else:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
            token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
            status, value = hub.answer(self.command, self.path.partition("?")[0], body, token)
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    for method in ("GET", "POST", "PUT", "HEAD"):
        setattr(Handler, f"do_{method}", Handler.do)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield hub
    server.shutdown()


@pytest.fixture(scope="module")
def trained(tmp_path_factory, concept_corpus, module_static_encoder):
    """A model of a corpus whose path is nobody's business."""
    folder = tmp_path_factory.mktemp("private-place")
    (folder / "docs.jsonl").write_text("\n".join(document.to_json() for document in concept_corpus))
    module_static_encoder.save(folder / "encoder")
    corpus = hce.Corpus.load(folder / "docs.jsonl")
    recipe = hce.Recipe(epochs=1, batch_size=32)
    hce.train(corpus, str(folder / "encoder"), recipe=recipe, output=folder / "model")
    return folder / "model"


@pytest.fixture
def model(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "model")
    return tmp_path / "model"


def push(hub, *arguments):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    home = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HOME": "/nonexistent", "HF_HUB_DISABLE_XET": "1"}
    path = str(Path(hce.__file__).parents[1])
    command = [sys.executable, "-m", "hce", "push", *map(str, arguments)]
    return subprocess.run(command, env={**env, **home, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)


def test_the_model_arrives_and_only_what_hce_wrote(hub, model, tmp_path):
    """What arrives is a model of hce that loads to the same vectors; a stranger's file and the queries stay."""
    (model / "secret.txt").write_text("mine")
    ended = push(hub, model, "org/my-model", "--json")
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert answer["url"].endswith("/org/my-model") and set(answer["files"]) == set(hub.files)
    there = {each.relative_to(model).as_posix() for each in model.rglob("*") if each.is_file()}
    assert there - set(hub.files) == {"secret.txt", "dev.jsonl"} and set(hub.files) <= there
    (created,) = hub.created
    assert created == {"name": "my-model", "organization": "org", "visibility": "private"}
    assert hub.tokens == {TOKEN} or hub.tokens == {TOKEN, ""}  # none is sent along with a file to be put
    arrived = tmp_path / "arrived"
    for name, content in hub.files.items():
        (arrived / name).parent.mkdir(parents=True, exist_ok=True)
        (arrived / name).write_bytes(content)
    assert damage_in(arrived) == []
    known, found = ModelFolder.read(model), ModelFolder.read(arrived)
    assert (found.history, found.queries) == (known.history, [])
    assert Encoder.load(arrived).fingerprint == Encoder.load(model).fingerprint


def test_no_folder_of_this_machine_is_named(hub, model, trained):
    assert push(hub, model, "org/my-model", "--public").returncode == 0
    assert hub.created[0]["visibility"] == "public"
    assert str(trained.parent) in (model / "hce.json").read_text()
    assert not [name for name, content in hub.files.items() if b"private-place" in content]
    facts = json.loads(hub.files["hce.json"])
    assert (facts["corpus"]["source"], facts["encoder"].partition(",")[0]) == ("docs.jsonl", "encoder")


@pytest.mark.parametrize("status", [401, 403, 400])
def test_a_refusal_is_one_line_without_the_token(hub, model, status):
    """Even where the hub quotes the token."""
    hub.status = status
    ended = push(hub, model, "org/my-model")
    assert ended.returncode == 1 and hub.tokens == {TOKEN}
    assert re.fullmatch(rf"error: org/my-model: the hub refuses \({status}: .*\n", ended.stderr.splitlines(True)[-1])
    assert ("HF_TOKEN" in ended.stderr) == (status != 400)
    assert TOKEN not in ended.stderr + ended.stdout and "Traceback" not in ended.stderr


def test_nothing_is_asked_where_the_name_or_the_model_is_wrong(hub, model, tmp_path):
    assert "no name of a repository" in push(hub, model, "my-model").stderr
    assert "no name of a repository" in push(hub, model, "a/b/../c").stderr
    (model / "hce.json").unlink()
    assert "no model of hce there" in push(hub, model, "org/my-model").stderr
    assert not hub.tokens


def test_a_damaged_model_or_one_with_links_stays_here(model):
    (model / "history.jsonl").write_text("{}\n")
    with pytest.raises(FormatError, match=r"history\.jsonl has changed since it was written"):
        uploads_of(model)
    (model / "history.jsonl").unlink()
    (model / "history.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(OutsideError, match="a link"):
        uploads_of(model)


def test_nothing_outside_of_the_model_is_sent(model, tmp_path):
    """Even where the list of its files names a path that leads out, with the right checksum."""
    (tmp_path / "secret.txt").write_text("mine")
    known = json.loads((model / "checksums.json").read_text())
    (model / "checksums.json").write_text(json.dumps({**known, "../secret.txt": zlib.crc32(b"mine")}))
    with pytest.raises(FormatError, match=r"\.\./secret\.txt is missing, or is not a regular file"):
        uploads_of(model)


def test_a_hub_that_is_away_is_one_line(hub, model):
    hub.url = "http://127.0.0.1:9"
    ended = push(hub, model, "org/my-model")
    assert ended.returncode == 1 and ended.stderr.splitlines()[-1].startswith("error: the hub does not answer")
