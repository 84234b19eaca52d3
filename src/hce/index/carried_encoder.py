"""The encoder that an index carries: loaded when needed, and checked to be the one that made its vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np

from hce.contained import check_tree
from hce.encoding.encoder import Encoder, OnTokens
from hce.encoding.tables import Side
from hce.errors import FormatError, InputError
from hce.index.manifest import Manifest, StandbyEncoder
from hce.index.threads import heed_forks

ENCODER_FOLDER = "encoder"


class CarriedEncoder:
    """An encoder that one thread at a time uses, since tokenizers are not made for more.

    Args:
        index_folder: the folder of the index.
        told: what the manifest tells of the encoder: of the one in force, or of one that stands by.
        given: the encoder itself, where the caller has it.
    """

    def __init__(self, index_folder: Path, told: Manifest | StandbyEncoder, given: Encoder | None = None) -> None:
        self.index_folder = index_folder
        self._told = told
        self._encoder = given
        self._lock = Lock()
        heed_forks(self)

    def after_fork(self) -> None:
        """Wait for no thread of the parent, in a process that was just forked."""
        self._lock = Lock()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the encoder, known without loading it."""
        return self._told.fingerprint

    @property
    def suffix(self) -> str:
        """What the names of the encoder's folders end in."""
        return self._told.suffix

    def encoder(self) -> Encoder:
        """Return the encoder, loaded if it was not.

        Raises:
            FormatError: the folder holds another encoder than the one that made the vectors.
        """
        with self._lock:
            return self._loaded()

    def encode(self, texts: Sequence[str], side: Side, on_tokens: OnTokens | None = None) -> np.ndarray:
        """Encode texts to unit vectors of shape (texts, n); a transformer tells of its tokens, if that is asked for."""
        with self._lock:
            return self._loaded().encode(texts, side, on_tokens=on_tokens)

    def _loaded(self) -> Encoder:
        if self._encoder is None:
            folder = self.index_folder / self._told.encoder_folder
            check_tree(folder, self.index_folder)
            encoder = Encoder.load(folder)
            # Hashing all weights takes longer than loading them; files that nobody touched need not be hashed.
            if file_stamps(folder) != self._told.encoder_files and encoder.fingerprint != self._told.fingerprint:
                raise FormatError(
                    f"{folder} is not the encoder that made this index's vectors ({self._told.encoder}); "
                    "put that one back or index anew"
                )
            self._encoder = encoder
        return self._encoder


def check_same(encoder: Encoder, manifest: Manifest, index_folder: Path) -> None:
    """Refuse an encoder that did not make the vectors.

    Raises:
        InputError: `encoder` is another one.
    """
    fingerprint = encoder.fingerprint
    if fingerprint != manifest.fingerprint:
        raise InputError(
            f"{index_folder} holds vectors of the encoder {manifest.encoder} ({manifest.fingerprint[:12]}), not of "
            f"{encoder.name} ({fingerprint[:12]}); open it without naming an encoder, or index anew with that one"
        )


def file_stamps(folder: Path) -> dict[str, list[int]]:
    """Return size and time of last change of each file, by its path below the folder."""
    return {name: [found.st_size, found.st_mtime_ns] for name, found in check_tree(folder).items()}
