"""train(): adapts an encoder to a corpus, with labels or without, and writes a model folder.

The pairs and the held-out queries come from `hce.training.sources`, the algorithm is in `hce.training.co_training`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.data.judgments import Labels
from hce.data.language import warn_of_language
from hce.data.text import TOKEN
from hce.encoding.encoder import Encoder, fast_dtype
from hce.errors import InputError
from hce.files import require_new, unfinished
from hce.processes import is_first_process, process_count
from hce.training.co_training import TrainResult, co_train
from hce.training.heldout import LABELLED, DevSet, mean_over_kinds, means
from hce.training.model_folder import DevQuery, save_model
from hce.training.recipe import Precision, Recipe, Supervision
from hce.training.run import CheckpointFolder, Epoch
from hce.training.sources import sources_and_devset
from hce.tree.names import name_nodes

logger = logging.getLogger(__name__)

SMALL_CORPUS = 200
SHORT_DOCUMENT = 16  # tokens; the median below that leaves nothing to cut a span from


def train(
    corpus: Corpus,
    encoder: str | Encoder = "static",
    *,
    pairs: Labels | None = None,
    generated: Labels | None = None,
    dev: Labels | None = None,
    recipe: Recipe | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
) -> TrainResult:
    """Adapt an encoder to a corpus.

    Args:
        corpus: the documents.
        encoder: what to start from; an `Encoder` given here may be changed in place.
        pairs: labelled queries to train on; without any, training is unsupervised.
        generated: generated queries to train on besides; they are never measured by.
        dev: labelled queries to measure by; by default some of `pairs`, or pseudo-queries, are held out.
        recipe: the settings; by default those that measured best for this kind of encoder.
        output: a new folder for the model; the state of the run is kept beside it until it is done.
        resume: continue the unfinished run that is kept beside `output`, if there is one.
        progress: show bars.
        on_epoch: called with each epoch as it is finished.

    Raises:
        InputError: the corpus, the pairs, the recipe or the output folder cannot be used.
    """
    if output is not None:
        _require_place(output, resume)
    encoder = encoder if isinstance(encoder, Encoder) else Encoder.load(encoder)
    recipe = _settled(recipe, corpus, encoder, pairs or generated)
    _refuse_impossible(corpus, encoder, recipe)
    _warn_of_poor_data(corpus, recipe)
    warn_of_language(corpus, encoder.name)
    sources, devset = sources_and_devset(corpus, pairs, generated, dev, recipe)
    with _at_work(encoder, recipe):
        scores = devset.scores(encoder)
        given = means(scores)
        start = start_encoder(corpus, encoder, devset, given, recipe)
    checkpoints = None
    if output is not None:
        checkpoints = CheckpointFolder(unfinished(output), _identity(corpus, start, pairs, generated, dev, recipe))
    with _at_work(start, recipe):
        result = co_train(
            corpus, start, sources, devset, recipe, checkpoints=checkpoints, progress=progress, on_epoch=on_epoch
        )
        is_unchanged = start is encoder and not result.mix
        result = replace(result, before=given, after=given if is_unchanged else result.after)
        if output is not None and checkpoints is not None and is_first_process():
            if result.hierarchy.levels:
                result.hierarchy.names = name_nodes(result.hierarchy, corpus.texts())
            save_model(result, corpus, output, _before_and_after(devset, scores, result.encoder))
            checkpoints.remove()
    return result


def start_encoder(corpus: Corpus, encoder: Encoder, dev: DevSet, given: dict[str, float], recipe: Recipe) -> Encoder:
    """Return F0: the encoder as given, or, of a static one, its table fitted to the corpus where dev prefers that."""
    if not recipe.fit_static:
        return encoder
    return encoder.fitted_where(corpus, lambda fitted: mean_over_kinds(dev.measure(fitted)) > mean_over_kinds(given))


def improvement(result: TrainResult) -> str:
    """Say in one sentence what training did to the dev measure."""
    before, after = mean_over_kinds(result.before), mean_over_kinds(result.after)
    if result.mix == 0 and result.after == result.before:
        clearly = "" if LABELLED in result.after else " clearly"
        return (
            f"training did not{clearly} beat the encoder it started from ({before:.4f}), "
            "so that one is returned unchanged"
        )
    if result.mix == 0:
        return f"{result.metric}: {before:.4f} → {after:.4f} by fitting the table alone; training did not add to it"
    way = "" if result.mix == 1 else f", with {result.mix:.0%} of the way from the first weights to the trained ones"
    return f"{result.metric}: {before:.4f} → {after:.4f}{way}"


def _require_place(output: str | Path, resume: bool) -> None:
    """Refuse an output folder that holds something, and an unfinished run of it that is not to be continued."""
    require_new(output)
    if not resume and unfinished(output).exists():
        raise InputError(f"{unfinished(output)} holds an unfinished run: add --resume to continue it, or delete it")


def _settled(recipe: Recipe | None, corpus: Corpus, encoder: Encoder, labels: Labels | None) -> Recipe:
    """Return the recipe with everything decided that was left open."""
    recipe = recipe or Recipe.for_encoder(static=encoder.is_static, documents=len(corpus))
    return replace(recipe, mode=_supervision(recipe, labels), precision=_precision(recipe, encoder))


def _supervision(recipe: Recipe, labels: Labels | None) -> Supervision:
    if recipe.mode == "auto":
        return "unsupervised" if labels is None else "joint"
    if recipe.mode != "unsupervised" and labels is None:
        raise InputError(f"mode {recipe.mode!r} needs labelled pairs; give some, or train unsupervised")
    return recipe.mode


def _precision(recipe: Recipe, encoder: Encoder) -> Precision:
    """Choose what to compute in; a token table has no products that would be faster in bfloat16."""
    if recipe.precision != "auto":
        return recipe.precision
    is_fast = not encoder.is_static and fast_dtype(encoder.device) == torch.bfloat16
    return "bfloat16" if is_fast else "float32"


def _refuse_impossible(corpus: Corpus, encoder: Encoder, recipe: Recipe) -> None:
    if len(corpus) < 2:
        raise InputError(f"{corpus.name}: training needs at least 2 documents to tell apart, and there is 1")
    recipe.require_documents(len(corpus))
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in encoder.model.modules())
    if recipe.mode != "supervised" and recipe.pseudo == "simcse" and not has_dropout:
        raise InputError(f"{encoder.name} has no dropout, so SimCSE would show it the same text twice; use ict")


def _warn_of_poor_data(corpus: Corpus, recipe: Recipe) -> None:
    if recipe.mode == "supervised":
        return
    if len(corpus) < SMALL_CORPUS:
        logger.warning("only %d documents: expect little from training on them", len(corpus))
    some = range(0, len(corpus), max(1, len(corpus) // 200))
    if np.median([len(TOKEN.findall(corpus[position].full_text)) for position in some]) < SHORT_DOCUMENT:
        logger.warning(
            "half of the documents have fewer than %d words: spans of them say little, "
            "and labelled or generated queries would help more",
            SHORT_DOCUMENT,
        )


@contextmanager
def _at_work(encoder: Encoder, recipe: Recipe) -> Iterator[None]:
    """Compute in the recipe's precision, and remember words: the same texts are encoded many times."""
    with encoder.computing_in(getattr(torch, recipe.precision)), encoder.remembering_words():
        yield


def _identity(
    corpus: Corpus, encoder: Encoder, pairs: Labels | None, generated: Labels | None, dev: Labels | None, recipe: Recipe
) -> dict[str, object]:
    """Return all that decides the outcome of a run; only a run with an equal identity is continued."""
    return {
        "corpus": corpus.fingerprint,
        "encoder": encoder.fingerprint,
        "set of labelled pairs": pairs and pairs.digest,
        "set of generated queries": generated and generated.digest,
        "set of dev queries": dev and dev.digest,
        "number of processes": process_count(),
        **{f"setting {name}": value for name, value in recipe.as_dict().items()},
    }


def _before_and_after(dev: DevSet, before: dict[str, np.ndarray], encoder: Encoder) -> list[DevQuery]:
    """Return the score of each held-out query before and after training."""
    after = dev.scores(encoder)
    return [
        DevQuery(queries.kind, text, round(float(old), 4), round(float(new), 4))
        for queries in dev.panel
        for text, old, new in zip(queries.texts, before[queries.kind], after[queries.kind], strict=True)
    ]
