"""Refit: a table that its documents have outgrown is fitted to all of them, and all are encoded anew."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.index.encoder import ENCODER_FOLDER, file_stamps
from hce.index.hierarchy import FOLDER, grow_tree
from hce.index.manifest import Manifest, Refit
from hce.index.passages import Cutter
from hce.index.store import Store
from hce.index.writing import encode_all_anew
from hce.progress import progress_bar

logger = logging.getLogger(__name__)


def refit_table(store: Store) -> Manifest | None:
    """Fit the table to all documents and encode them anew; the commit to the store decides between old and new.

    Returns:
        The manifest that is in force from now on; None where nothing was done, since the table is another version's.
    """
    index = store.path.parent
    with store.writing() as writer:
        known = replace(Manifest.read(index, writer), refit=None)
        documents = [entry.document for entry in writer.entries()]
        encoder = Encoder.for_corpus("static", Corpus.from_documents(documents))
        if (encoder.dim, encoder.window) != (known.dim, known.window):
            logger.warning("%s: its table is not that of this version, and was not fitted anew", index)
            return None
        with progress_bar("encoding anew", len(documents), "documents", show=False) as advance:
            encode_all_anew(writer, encoder.encode, Cutter(encoder), advance)
        change, folder = writer.next.change, f"{ENCODER_FOLDER}-{writer.next.change}"
        shutil.rmtree(index / folder, ignore_errors=True)
        encoder.save(index / folder)
        refit = Refit(
            *writer.next,
            encoder=encoder.name,
            fingerprint=encoder.fingerprint,
            encoder_files=file_stamps(index / folder),
            encoder_folder=folder,
            fitted_documents=len(documents),
            hierarchy=known.hierarchy and grow_tree(index, f"{FOLDER}-{change}", writer),
        )
        known.before_refit(refit).write(index)
        writer.forget_all(known.documents)
    manifest = Manifest.read(index)
    manifest.write(index)
    return manifest
