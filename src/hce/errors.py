"""Errors that users can fix; the command line prints their one-sentence messages."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from logging import Logger

# Refusals by the operating system, not faults of the program: disk full, no permission, a failing disk.
REFUSALS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE, errno.ENXIO, errno.ENODEV),
)

LONGEST_REASON = 300  # characters quoted from a library's error


class HceError(Exception):
    """Base of the errors with a message for the user: what, where, what to do."""


class InputError(HceError):
    """A file, a value or an option is wrong."""


def wrong_type(value: object, advice: str) -> InputError:
    """Return the error for an argument of the wrong type.

    >>> str(wrong_type(["q1"], "queries: give a mapping of ids to queries"))
    'queries: give a mapping of ids to queries, not list'
    """
    return InputError(f"{advice}, not {type(value).__name__}")


class OutsideError(InputError):
    """A link, pipe or device in an index or a model, or a path that leads out of it."""


class WriterBusyError(InputError):
    """Another writer is active; the same call may succeed a little later."""


class AwayError(HceError):
    """A server or host is away, or refuses for now; the same call may succeed later."""


class MissingPackageError(HceError):
    """An optional package is missing; the message gives the command to install it."""


@contextmanager
def needs_extra(extra: str, what: str) -> Iterator[None]:
    """Turn an ImportError in this block into an error with the install command."""
    try:
        yield
    except ImportError as error:
        install = f"pip install 'hierarchical-corpus-encoder[{extra}]'"
        raise MissingPackageError(f"{what} needs {error.name}, not installed here; {install}") from error


class FormatError(HceError):
    """A file on disk is damaged, incomplete, or in another version's format."""


def system_reason(error: BaseException) -> str | None:
    """Return the operating system's reason for an error; None for other errors.

    Libraries in Rust and C++ (safetensors, tokenizers, tantivy, faiss) quote that reason in errors of their own.

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
    r"""Return an error's message as one short line, to quote inside a sentence.

    >>> one_line(ValueError("bad\n\n  header")), one_line(KeyError())
    ('bad header', 'KeyError')
    """
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) and text:
        text = f"{text} is missing"
    return (text[:LONGEST_REASON].rstrip() + " …" if len(text) > LONGEST_REASON else text) or type(error).__name__
