"""Names of models: mistyped ones are refused at once, and the hub is asked once and not for each file."""

from __future__ import annotations

import httpx
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from hce.encoding import bundled
from hce.encoding.encoder import Encoder
from hce.encoding.reranker import Reranker
from hce.errors import InputError


def answered(kind, code):
    request = httpx.Request("HEAD", "https://hub.example.org/x")
    return kind("no", response=httpx.Response(code, request=request))


@pytest.fixture
def hub(monkeypatch):
    """A hub that raises what it is told to, and what it was asked for."""
    asked = []

    def become(fault):
        def get(url, timeout):
            asked.append(url.split("/resolve/")[0].split("/", 3)[3])
            if fault is not None:
                raise fault

        monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", get)
        return asked

    return become


@pytest.mark.parametrize(("name", "meant"), [("minlm", "minilm"), ("MiniLM", "minilm"), ("statik", "static")])
def test_a_mistyped_name_is_refused_before_the_hub_is_asked(name, meant, hub):
    asked = hub(None)
    with pytest.raises(InputError, match=f"no encoder '{name}'; did you mean '{meant}'"):
        Encoder.load(name)
    assert asked == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minilm", "'minilm' is an encoder, not a cross-encoder"),
        ("ms-marco-MiniLM-L6-v2", "did you mean 'cross-encoder/ms-marco-MiniLM-L6-v2'"),
        ("bge-reranker-bass", "did you mean 'BAAI/bge-reranker-base'"),
    ],
)
def test_a_mistyped_cross_encoder_is_refused_before_the_hub_is_asked(name, said, hub):
    asked = hub(None)
    with pytest.raises(InputError, match=said):
        Reranker.load(name)
    assert asked == []


def test_what_the_hub_does_not_have_may_be_mistyped(hub):
    hub(answered(RepositoryNotFoundError, 404))
    with pytest.raises(InputError, match="nor the hub has it; did you mean 'cross-encoder/ms-marco-MiniLM-L6-v2'"):
        Reranker.load("cross-encodr/ms-marco-MiniLM-L6-v2")


@pytest.mark.parametrize("name", ["static", "minilm", "bert-base-uncased", "all-MiniLM-L6-v2", "me/minlm"])
def test_other_names_are_not_refused(name):
    bundled.refuse_mistyped(name)


def test_a_folder_and_a_downloaded_model_may_have_any_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minlm").mkdir()
    bundled.refuse_mistyped("minlm")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: "/cache/config.json")
    bundled.refuse_mistyped("statik")


@pytest.mark.parametrize(
    "fault", [httpx.ConnectError("unknown host"), httpx.ReadTimeout("slow"), OfflineModeIsEnabled("off")]
)
def test_without_a_hub_a_downloaded_copy_will_do(fault, hub, monkeypatch):
    asked = hub(fault)
    with pytest.raises(
        InputError, match="no encoder 'org/model': it is not on this machine, and the hub does not answer"
    ):
        Encoder.load("org/model")
    with pytest.raises(InputError, match="no cross-encoder 'org/model': it is not on this machine"):
        Reranker.load("org/model")
    assert asked == ["org/model"] * 2
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: "/cache/config.json")
    assert bundled.stays_off_the_hub("org/model", "encoder", "")


def test_a_model_that_the_hub_does_not_have(hub):
    asked = hub(answered(RepositoryNotFoundError, 404))
    with pytest.raises(InputError, match="no encoder 'model': neither this machine nor the hub has it; give 'minilm'"):
        Encoder.load("model")
    assert asked == ["model", "sentence-transformers/model"]


@pytest.mark.parametrize("fault", [None, answered(GatedRepoError, 403), answered(HfHubHTTPError, 429)])
def test_a_hub_that_answers_is_used(fault, hub):
    """Whatever else is wrong, loading says it."""
    hub(fault)
    assert not bundled.stays_off_the_hub("org/model", "encoder", "")


def test_a_mistyped_reranker_is_told_before_the_index_is_opened(run_hce):
    run = run_hce("search", "nowhere", "x", "--rerank", "minilm")
    assert run.returncode == 1
    assert run.stderr.startswith("error: 'minilm' is an encoder, not a cross-encoder")


def test_a_mistyped_encoder_is_told_before_the_documents_are_read(run_hce, tmp_path):
    for command in (["train", "nowhere.jsonl", "-o", "m", "-e"], ["index", "nowhere.jsonl", "-o", "i", "-m"]):
        run = run_hce(*command, "minlm")
        assert run.returncode == 1
        assert run.stderr == "error: no encoder 'minlm'; did you mean 'minilm'?\n"
