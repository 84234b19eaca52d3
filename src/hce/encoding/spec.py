"""Whether a name can be loaded, known before anything is: a mistyped one is refused at once.

The hub's client asks for each file of a model five times. Without a network, a mistyped name takes minutes that way.
One request without retries is enough to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from hce.errors import InputError, one_line

BUNDLED_NAMES = ("static", "minilm")
LIKENESS = 0.7  # of two names, above which one may be the other mistyped
SECONDS = 10  # that the hub has to answer
PROOFS = ("modules.json", "config.json")  # files of which a downloaded model has at least one


def refuse_mistyped(spec: str, known: Sequence[str] = BUNDLED_NAMES, what: str = "encoder") -> None:
    """Refuse a name that is nearly a known one, but no path, file name or encoder of this machine.

    Raises:
        InputError: it is, with the known name.
    """
    if spec in known or "/" in spec or Path(spec).suffix or Path(spec).exists():
        return
    meant = get_close_matches(spec.lower(), known, n=1, cutoff=LIKENESS)
    if meant and not _is_downloaded(spec):
        raise InputError(f"no {what} {spec!r}; did you mean {meant[0]!r}?")


def stays_off_the_hub(spec: str, what: str, advice: str) -> bool:
    """Ask the hub once for a model, and return whether to use the downloaded copy without asking again.

    Args:
        spec: a hub id.
        what: the kind of model, for messages.
        advice: what to give instead.

    Raises:
        InputError: the hub has no such model, or does not answer and there is no downloaded copy.
    """
    try:
        if any(_is_on_the_hub(name) for name in _ids(spec)):
            return False
    except OSError as error:
        if _is_downloaded(spec):
            return True
        raise InputError(
            f"no {what} {spec!r}: it is not on this machine, and the hub does not answer ({one_line(error)}); {advice}"
        ) from error
    raise InputError(f"no {what} {spec!r}: neither this machine nor the hub has it; {advice}")


def _ids(spec: str) -> Iterator[str]:
    """Yield the ids that sentence-transformers tries for a name."""
    yield spec
    if "/" not in spec:
        yield f"sentence-transformers/{spec}"


def _is_downloaded(spec: str) -> bool:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for name in _ids(spec) for file in PROOFS)
    except HFValidationError:  # no id at all
        return False


def _is_on_the_hub(name: str) -> bool:
    """Ask whether the hub has a model.

    Raises:
        OSError: the hub does not answer.
        HFValidationError: the name cannot be a model's.
    """
    import httpx
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, PROOFS[-1]), timeout=SECONDS)
    except RepositoryNotFoundError as error:
        return isinstance(error, GatedRepoError)  # which is there, and says on loading what it needs
    except HfHubHTTPError:  # it lacks this file, or the hub is busy: loading will show
        return True
    except httpx.HTTPError as error:
        raise OSError(one_line(error)) from error
    return True
