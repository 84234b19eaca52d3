"""A trained model to a model hub: only files that hce wrote, and no folder names of this machine."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import httpx
from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from hce._version import __version__
from hce.contained import check_tree, read_bytes
from hce.errors import AwayError, FormatError, InputError, one_line
from hce.files import CHECKSUMS, read_json, require_undamaged
from hce.training.model_folder import FACTS, QUERIES, REMEDY, ModelFacts

CARD = "README.md"
KEPT_HERE = (QUERIES,)  # texts of the corpus
LOGIN = "set HF_TOKEN to a token that may write, or run 'hf auth login'"


def push(model: str | Path, repository: str, *, public: bool = False) -> tuple[str, list[str]]:
    """Upload a model that hce trained, as one commit.

    Args:
        model: its folder.
        repository: ORG/NAME on the hub; it is made where there is none.
        public: whether a new one can be read by everybody.

    Returns:
        The address of the repository, and the names of the files.

    Raises:
        InputError: no such name is possible, or the hub refuses the token.
        FormatError: hce wrote no model there, or it is damaged.
        AwayError: the hub does not answer.
    """
    contents = uploads_of(Path(model))
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api = HfApi(library_name="hce", library_version=__version__)
    try:
        if repository.count("/") != 1:
            raise HFValidationError("give ORG/NAME")
        url = api.create_repo(repository, private=not public, exist_ok=True)
        api.create_commit(repository, operations, commit_message=f"Model of hce {__version__}")
    except HFValidationError as error:
        raise InputError(f"{repository!r} is no name of a repository ({one_line(error)})") from error
    except LocalTokenNotFoundError as error:
        raise InputError(f"the hub wants a token; {LOGIN}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = f"; {LOGIN}" if status in (401, 403) else ""
        raise InputError(f"{repository}: the hub refuses ({status}: {_without_token(error)}){remedy}") from None
    except (httpx.HTTPError, OSError) as error:
        raise AwayError(f"the hub does not answer ({_without_token(error)}); try again later") from None
    return str(url), list(contents)


def uploads_of(folder: Path) -> dict[str, Path | bytes]:
    """Return the files or contents to upload, by name: what `checksums.json` lists, and the model card.

    Held-out queries stay here, since they are texts of the corpus. Folders are cut to their last name.
    """
    facts = ModelFacts.read(folder)
    require_undamaged(folder, REMEDY)
    found, known = check_tree(folder), read_json(folder / CHECKSUMS)
    if FACTS not in known:
        raise FormatError(f"{folder}: {CHECKSUMS} does not list {FACTS}; {REMEDY}")
    contents: dict[str, Path | bytes] = {name: folder / name for name in known if name not in KEPT_HERE}
    for name in (FACTS, *([CARD] if CARD in found else [])):
        contents[name] = _without_folders(read_bytes(folder / name).decode(), _places_in(facts)).encode()
    checksums = {name: value for name, value in known.items() if name not in KEPT_HERE}
    checksums[FACTS] = zlib.crc32(contents[FACTS])  # type: ignore[arg-type]
    return {**contents, CHECKSUMS: (json.dumps(checksums, indent=2) + "\n").encode()}


def _places_in(facts: ModelFacts) -> list[str]:
    """Return the files and folders of this machine that the facts name, longest first."""
    named = [facts.corpus.get("source"), facts.base_encoder, *facts.label_files.values()]
    places = {each for each in named if each and Path(each).name != each and _is_here(each)}
    return sorted(places, key=len, reverse=True)


def _is_here(name: str) -> bool:
    """Return whether a name is of a file, and not a hub id such as org/name."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") != 1 or Path(name).exists()


def _without_folders(text: str, places: list[str]) -> str:
    for place in places:
        for spelled in (json.dumps(place, ensure_ascii=False)[1:-1], place):
            text = text.replace(spelled, Path(place).name)
    return text


def _without_token(error: Exception) -> str:
    token = get_token()
    return one_line(error).replace(token, "…") if token else one_line(error)
