"""Errors that users can mend; each is one sentence, which the command line prints."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from logging import Logger

# What the system refuses when nothing is wrong with the program: no room, no right, a disk that fails.
REFUSALS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ENXIO, errno.ENODEV),
)

LONGEST_REASON = 300  # characters of what a library says


class HceError(Exception):
    """The base of every error whose message is meant for the user: what, where, what to do."""


class InputError(HceError):
    """A file, a value or an option is not what it has to be."""


def wrong_type(value: object, advice: str) -> InputError:
    """Return the error for an argument of a wrong type.

    >>> str(wrong_type(["q1"], "queries: give a mapping of ids to queries"))
    'queries: give a mapping of ids to queries, not list'
    """
    return InputError(f"{advice}, not {type(value).__name__}")


class OutsideError(InputError):
    """Something in the folder of an index or a model leads out of it: a link, a pipe, a device."""


class WriterBusyError(InputError):
    """Someone else is writing just now; the same call may succeed a little later."""


class AwayError(HceError):
    """A server does not answer, or cannot do now what it is asked for; it may a little later."""


class MissingPackageError(HceError):
    """An optional package is needed; the message holds the command that installs it."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn an import error in this block into one with the command that helps."""
    try:
        yield
    except ImportError as error:
        install = f"pip install 'hierarchical-corpus-encoder[{extra}]'"
        raise MissingPackageError(f"{what} needs {error.name}, not installed here; {install}") from error


class FormatError(HceError):
    """Something on disk was not written by this version, or is damaged or incomplete."""


def system_reason(error: BaseException) -> str | None:
    """Return what the operating system refused, if that is what an error is about.

    Libraries in Rust and C++ (safetensors, tokenizers, tantivy, faiss) raise errors of their own that quote the system.

    >>> system_reason(RuntimeError("write error in storage.faiss: 0 != 1 (No space left on device)"))
    'No space left on device'
    """
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return next((text for text in map(os.strerror, REFUSALS) if text in str(error)), None)


@lru_cache(maxsize=64)
def warn_once(logger: Logger, line: str) -> None:
    """Log a warning unless this line was logged recently."""
    logger.warning("%s", line)


def one_line(error: BaseException) -> str:
    r"""Say in one short line what any error says, for the middle of a sentence.

    >>> one_line(ValueError("bad\n\n  header")), one_line(KeyError())
    ('bad header', 'KeyError')
    """
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) and text:
        text = f"{text} is missing"
    return (text[:LONGEST_REASON].rstrip() + " …" if len(text) > LONGEST_REASON else text) or type(error).__name__
