"""train(): from a corpus, and whatever labels there are, to a better encoder and a model folder.

Decides what to train on, holds queries out to measure by, warns of what cannot help, and writes the result; the
algorithm itself is in `hce.training.co_training`.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.data.judgments import Labels
from hce.data.text import TOKEN
from hce.encoding.encoder import Encoder, fast_dtype
from hce.errors import InputError
from hce.files import require_new, unfinished
from hce.processes import is_first_process, process_count
from hce.training.co_training import TrainResult, co_train
from hce.training.heldout import LABELLED, DevSet, labelled_dev, mean_over_kinds, means, pseudo_dev
from hce.training.model_folder import DevQuery, save_model
from hce.training.pairs import DropoutTwins, InverseCloze, LabelledPairs, PairSource
from hce.training.recipe import Mode, Precision, Recipe
from hce.training.run import CheckpointFolder, Epoch
from hce.training.steps import Sources
from hce.tree.names import name_nodes

logger = logging.getLogger(__name__)


SMALL_CORPUS = 200
SHORT_DOCUMENT = 16  # tokens; the median below that leaves nothing to cut a span from
LEAST_DEV_QUERIES = 20
SHORT_TRAINING = 100_000  # pairs in all epochs
MANY_ANSWERS = 4  # right documents a query, on average; from so many on, a query stands for a topic


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
    state_folder = _state_folder(output, resume)
    if len(corpus) < 2:
        raise InputError(f"{corpus.name}: training needs at least 2 documents to tell apart, and there is 1")
    encoder = encoder if isinstance(encoder, Encoder) else Encoder.load(encoder)
    recipe = recipe or Recipe.for_encoder(static=encoder.is_static, documents=len(corpus))
    recipe = replace(recipe, mode=_mode(recipe, pairs or generated), precision=_precision(recipe, encoder))
    _check(corpus, encoder, recipe)
    sources, devset = prepare(corpus, pairs, generated, dev, recipe)
    with _at_work(encoder, recipe):
        first_scores = devset.scores(encoder)
        given = means(first_scores)
        start = start_encoder(corpus, encoder, devset, given, recipe)
        is_fitted, encoder = start is not encoder, start
    checkpoints = None
    if state_folder is not None:
        checkpoints = CheckpointFolder(state_folder, _identity(corpus, encoder, (pairs, generated, dev), recipe))
    with _at_work(encoder, recipe):
        result = co_train(
            corpus,
            encoder,
            sources,
            devset,
            recipe,
            checkpoints=checkpoints,
            progress=progress,
            on_epoch=on_epoch,
        )
        unchanged = not result.mix and not is_fitted
        result = replace(result, before=given, after=given if unchanged else result.after)
        if output is not None and checkpoints is not None and is_first_process():
            if result.hierarchy.levels:
                result.hierarchy.names = name_nodes(result.hierarchy, corpus.texts())
            save_model(result, corpus, output, _queries_before_and_after(devset, first_scores, result.encoder))
            checkpoints.remove()
    return result


@contextmanager
def _at_work(encoder: Encoder, recipe: Recipe) -> Iterator[None]:
    """An encoder that reads the same texts again and again, in the precision of the recipe."""
    with encoder.computing_in(getattr(torch, recipe.precision)), encoder.remembering_words():
        yield


def start_encoder(corpus: Corpus, encoder: Encoder, dev: DevSet, given: dict[str, float], recipe: Recipe) -> Encoder:
    """F0: the encoder as given, or, of a static one, its table fitted to the corpus where that is better on dev."""
    if not encoder.is_static or not recipe.fit_static:
        return encoder
    fitted = encoder.fitted_to(corpus)
    return fitted if mean_over_kinds(dev.measure(fitted)) > mean_over_kinds(given) else encoder


def _identity(corpus: Corpus, encoder: Encoder, labels: tuple[Labels | None, ...], recipe: Recipe) -> dict[str, object]:
    """What a run is of, by which a continued one is told from another."""
    digest = hashlib.sha256()
    for part in labels:
        rows = [] if part is None else [(part.queries[j.query_id].text, *j) for j in part.qrels.judgments()]
        digest.update(json.dumps(rows).encode())
    return {
        "corpus": corpus.fingerprint,
        "encoder": encoder.fingerprint,
        "labels": digest.hexdigest(),
        "number of processes": process_count(),
        **{f"setting {name}": value for name, value in recipe.as_dict().items()},
    }


def _queries_before_and_after(dev: DevSet, before: dict[str, np.ndarray], encoder: Encoder) -> list[DevQuery]:
    """Each held-out query before and after training, for whoever asks what changed."""
    after = dev.scores(encoder)
    return [
        DevQuery(queries.kind, text, round(float(old), 4), round(float(new), 4))
        for queries in dev.panel
        for text, old, new in zip(queries.texts, before[queries.kind], after[queries.kind], strict=True)
    ]


def _state_folder(output: str | Path | None, resume: bool) -> Path | None:
    """The place of a run's state: beside its output, under a name that says so."""
    if output is None:
        return None
    require_new(output)
    folder = unfinished(output)
    if not resume and folder.exists():
        raise InputError(f"{folder} holds an unfinished run: add --resume to continue it, or delete it")
    return folder


def _mode(recipe: Recipe, labels: Labels | None) -> Mode:
    if recipe.mode == "auto":
        return "unsupervised" if labels is None else "joint"
    if recipe.mode != "unsupervised" and labels is None:
        raise InputError(f"mode {recipe.mode!r} needs labelled pairs; give some, or train unsupervised")
    return recipe.mode


def _precision(recipe: Recipe, encoder: Encoder) -> Precision:
    """What to compute in; a token table has no products that would be faster in bfloat16."""
    if recipe.precision != "auto":
        return recipe.precision
    is_fast = not encoder.is_static and fast_dtype(encoder.device) == torch.bfloat16
    return "bfloat16" if is_fast else "float32"


def _check(corpus: Corpus, encoder: Encoder, recipe: Recipe) -> None:
    """Refuse what cannot work; warn of what hardly will."""
    if recipe.batch_size > len(corpus):
        raise InputError(
            f"batch_size {recipe.batch_size} is larger than the corpus ({len(corpus)} documents); "
            f"give {max(2, len(corpus) // 4)} or so"
        )
    if recipe.mode == "supervised":
        return
    if recipe.pseudo == "simcse" and not _has_dropout(encoder):
        raise InputError(f"{encoder.name} has no dropout, so SimCSE would show it the same text twice; use ict")
    if len(corpus) < SMALL_CORPUS:
        logger.warning("only %d documents: expect little from training on them", len(corpus))
    step = max(1, len(corpus) // 200)
    lengths = [len(TOKEN.findall(corpus[number].full_text)) for number in range(0, len(corpus), step)]
    if np.median(lengths) < SHORT_DOCUMENT:
        logger.warning(
            "half of the documents have fewer than %d words: spans of them say little, "
            "and labelled or generated queries would help more",
            SHORT_DOCUMENT,
        )


def _has_dropout(encoder: Encoder) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in encoder.model.modules())


def prepare(
    corpus: Corpus, pairs: Labels | None, generated: Labels | None, dev: Labels | None, recipe: Recipe
) -> tuple[Sources, DevSet]:
    """Pairs to train on and queries to measure by, which have nothing in common."""
    if recipe.mode == "unsupervised":
        pairs = generated = None
    if pairs is not None:
        pairs, dev = split_labels(pairs, recipe) if dev is None else (_without(pairs, dev), dev)
    held_out = np.empty(0, dtype=np.int64)
    if dev is None:
        count = min(recipe.dev_queries, max(1, len(corpus) // 10))
        rng = np.random.default_rng([recipe.seed, 7])
        held_out = np.sort(rng.choice(len(corpus), count, replace=False))
        devset = pseudo_dev(corpus, held_out, recipe.dev_pool, recipe.seed)
    else:
        devset = labelled_dev(corpus, dev.queries, dev.qrels, recipe.dev_pool, recipe.seed)
    labelled = pairs.joined(generated) if pairs and generated else pairs or generated
    supervised = unsupervised = None
    if labelled is not None:
        supervised = LabelledPairs(corpus, labelled.queries, labelled.qrels, seed=recipe.seed)
    if recipe.mode != "supervised":
        unsupervised = _pseudo_pairs(corpus, np.setdiff1d(np.arange(len(corpus)), held_out), recipe)
    return Sources(supervised, unsupervised, held_out, _wants_level_losses(supervised, len(corpus), recipe)), devset


def _wants_level_losses(labelled: LabelledPairs | None, documents: int, recipe: Recipe) -> bool:
    """Whether pulling queries towards regions of the tree is likely to pay (docs/LOG.md).

    A query that one document answers is about that document and not about a region of the tree. Where people ask such
    queries, level losses cost more than they gain, those of pseudo-queries too. Without labels nobody knows what will
    be asked: then level losses gain recall in a short training, and in a long one wear away what tells the documents of
    a region apart.
    """
    if labelled is not None:
        return len(labelled) >= MANY_ANSWERS * len(labelled.texts)
    return recipe.epochs * (recipe.epoch_pairs or documents) <= SHORT_TRAINING


def _without(pairs: Labels, dev: Labels) -> Labels:
    """The pairs less the queries that are measured by."""
    kept = [name for name in pairs.qrels if name not in dev.qrels]
    if len(kept) < len(pairs.qrels):
        logger.warning("%d dev queries are among the pairs too; not trained on", len(pairs.qrels) - len(kept))
    return pairs.only(kept)


def _pseudo_pairs(corpus: Corpus, numbers: np.ndarray, recipe: Recipe) -> PairSource:
    if recipe.pseudo == "simcse":
        return DropoutTwins(corpus, numbers, seed=recipe.seed)
    return InverseCloze(
        corpus,
        numbers,
        lengths=recipe.span_lengths,
        cut_share=recipe.cut_share,
        window=recipe.window,
        seed=recipe.seed,
    )


def split_labels(pairs: Labels, recipe: Recipe) -> tuple[Labels, Labels]:
    """Hold a tenth of the labelled queries out, whole queries at a time."""
    names = list(pairs.qrels)
    if len(names) < 2 * LEAST_DEV_QUERIES:
        raise InputError(
            f"{len(names)} labelled queries are too few to hold some out to measure by; give dev queries of their own"
        )
    count = max(LEAST_DEV_QUERIES, min(recipe.dev_queries, len(names) // 10))
    rng = np.random.default_rng([recipe.seed, 7])
    held = {names[index] for index in rng.choice(len(names), count, replace=False)}
    return pairs.only(name for name in names if name not in held), pairs.only(name for name in names if name in held)


def improvement(result: TrainResult) -> str:
    """One sentence on what training did to the dev measure."""
    before, after = mean_over_kinds(result.before), mean_over_kinds(result.after)
    if result.mix == 0 and result.after == result.before:
        clearly = "" if LABELLED in result.after else " clearly"
        return (
            f"training did not{clearly} beat the encoder it started from ({before:.4f}), "
            "so that one is returned unchanged"
        )
    if result.mix == 0:
        return f"{result.metric}: {before:.4f} → {after:.4f} by fitting the table alone; training did not add to it"
    share = "" if result.mix == 1 else f", with {result.mix:.0%} of the way from the first weights to the trained ones"
    return f"{result.metric}: {before:.4f} → {after:.4f}{share}"
