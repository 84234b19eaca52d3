"""train(): adapt an encoder to a corpus, with or without labels, and write a model folder.

Pairs and held-out queries come from `hce.training.pairs`; the algorithm is in `hce.training.co_training`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hce.data.corpus import Corpus
from hce.data.judgments import Labels
from hce.data.text import WORD_OR_MARK, Document, hash64, warn_of_language
from hce.encoding.encoder import Encoder, fast_dtype
from hce.errors import InputError, wrong_type
from hce.files import delete_whole, require_free, unfinished
from hce.processes import (
    is_first_process,
    of_the_first,
    process_count,
    require_alike,
    require_shared,
    take_weights_of_the_first,
)
from hce.training.co_training import CheckpointFolder, TrainResult, co_train, weights_of
from hce.training.companion import with_companions, without_companions
from hce.training.model_folder import Epoch, gains, mean_over_kinds, save_model
from hce.training.pairs import LABELED, DevSet, LabelSets, documents_to_learn, means, sources_and_devset
from hce.training.query_mean import QueryMean
from hce.training.recipe import Recipe, recipe_of_table, recipe_of_tuning
from hce.training.steps import only_upper_layers
from hce.tree.names import name_nodes

logger = logging.getLogger(__name__)

SMALL_CORPUS = 200
LEAST_TO_TUNE = 400  # labeled queries
CLEAR = 1.0  # standard errors; fine-tuning that loses this much is undone
SHORT_DOCUMENT = 16  # words and marks; too short to cut a useful span from
LONG_DOCUMENT = 512  # tokens; few documents have more
# Bytes for each activation that a trained matrix reads or writes: 4, and half of that for the scores of attention. By
# this estimate, fine-tuning MiniLM by 500 labels takes 2.4 GB in all; 2.3 GB were measured (docs/LOG.md).
BYTES_KEPT = 6
MiB = 1 << 20


def train(
    corpus: Corpus | Iterable[Document],
    encoder: str | Encoder = "static",
    *,
    pairs: Labels | None = None,
    generated: Labels | None = None,
    dev: Labels | None = None,
    log: Sequence[str] | QueryMean = (),
    recipe: Recipe | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    progress: bool = False,
    on_epoch: Callable[[Epoch], None] = lambda epoch: None,
    label_files: Mapping[str, str] | None = None,
) -> TrainResult:
    """Adapt an encoder to a corpus.

    Args:
        corpus: the documents.
        encoder: the encoder to start from; an `Encoder` object may be changed in place.
        pairs: labeled queries to train on; without these and `generated`, training is unsupervised.
        generated: generated queries to train on too; they are never used to measure.
        dev: labeled queries to measure with; by default some of `pairs`, or pseudo-queries, are held out.
        log: queries that people asked, without answers. Most of their mean vector is subtracted from a transformer's
            queries. Or give that mean, as `hce serve --learn-queries` keeps it. No query is stored.
        recipe: the settings; by default those that measured best for this kind of encoder.
        output: a new folder for the model; until it is written, the state of the run is kept next to it.
        resume: continue the unfinished run next to `output`, if there is one.
        progress: show bars.
        on_epoch: called with each finished epoch.
        label_files: where the labels came from, as `hce train --labels` names them; kept with the model for its report.

    Raises:
        InputError: the corpus, the pairs, the recipe or the output folder cannot be used.
    """
    if output is not None:
        require_free(output, resume)
    corpus = corpus if isinstance(corpus, Corpus) else Corpus.from_documents(corpus)
    for name, labels in (("pairs", pairs), ("generated", generated), ("dev", dev)):
        if not isinstance(labels, Labels | None):
            raise wrong_type(labels, f"{name}: give hce.Labels(queries, qrels)")
    if not isinstance(recipe, Recipe | None):
        raise wrong_type(recipe, "recipe: give an hce.Recipe")
    encoder = encoder if isinstance(encoder, Encoder) else Encoder.load(encoder)
    given = encoder.parts[0]  # its companions, if any, are made again
    tuning = None if log else _tuning(recipe or Recipe(), corpus, given, pairs)
    recipe = _settled(recipe, corpus, given, pairs or generated)
    label_sets = LabelSets(pairs, generated, dev, log if isinstance(log, QueryMean) else tuple(log))
    corpus = documents_to_learn(corpus, recipe, (pairs, generated, dev))
    _refuse_impossible(corpus, given, recipe, log)
    _warn_of_poor_data(corpus, given, recipe, log)
    run_folder = None if output is None else unfinished(output)
    if process_count() > 1:
        require_alike(_identity(corpus, given, label_sets, recipe))
        if output is not None:
            require_shared(Path(output).absolute().parent)
    training = _Training(corpus, given, label_sets, recipe, tuning, run_folder, progress, on_epoch)
    result = replace(training.run(), vectors=None)
    if output is not None and run_folder is not None and is_first_process():
        if result.hierarchy.levels:
            result.hierarchy.names = name_nodes(result.hierarchy, corpus.texts(), progress=progress)
        save_model(result, corpus, output, label_files or {})
        delete_whole(run_folder)
    return result


class _Training(NamedTuple):
    """A call of `train` with everything decided; see `hce.training.recipe` for the cases."""

    corpus: Corpus
    given: Encoder  # without companions
    label_sets: LabelSets
    recipe: Recipe
    tuning: Recipe | None  # how labels fine-tune a transformer before it gets companions; None: they do not
    run_folder: Path | None  # keeps the state of the run until training is done; None: nothing is kept
    progress: bool
    on_epoch: Callable[[Epoch], None]  # called with each epoch, except those of a `_part`

    def run(self) -> TrainResult:
        """Train the parts that the recipe names, and add its companions."""
        if self.recipe.train == "encoder":
            return without_companions(self.corpus, self._fit(self.given))
        if self.given.is_table:
            result = self._fit(self.given)
            return self._accompanied(result.encoder, result, [])
        table = self.given.token_table()  # of the transformer before training
        if self.recipe.train == "both":
            result = self._fit(self.given)
            return self._accompanied(result.encoder, result, [self._fit_table(table)])
        tuned = self._tuned()
        result = self._fit(table)
        result = self._accompanied(self.given, result, [result.encoder])
        if tuned is None:
            return result
        stages, mix = {"fine-tuning": tuned.after, **result.stages}, result.mix or tuned.mix
        return replace(result, ndcg_before=tuned.ndcg_before, stages=stages, mix=mix)

    def _accompanied(self, encoder: Encoder, result: TrainResult, tables: list[Encoder]) -> TrainResult:
        """Add companions to an encoder, and calibrate the shares of a search."""
        log = self.label_sets.log
        return with_companions(self.corpus, encoder, result, tables, self.run_folder, log=log, progress=self.progress)

    def _fit_table(self, table: Encoder) -> Encoder:
        """Train the token table of a transformer that is trained too."""
        recipe = recipe_of_table(self.recipe, len(self.corpus))
        return self._part("table", recipe, self.label_sets)._fit(table).encoder

    def _tuned(self) -> TrainResult | None:
        """Fine-tune the transformer in place; undo that if held-out NDCG@10 clearly fell."""
        if self.tuning is None:
            return None
        start = weights_of(self.given)
        result = self._part("tuned", self.tuning, self.label_sets._replace(generated=None))._fit(self.given)
        lost = result.ndcg_before[LABELED] - result.ndcg_after[LABELED]
        against = {"errors": lost.mean() / max(lost.std() / np.sqrt(len(lost)), 1e-9)}
        if of_the_first(against, self.given.device)["errors"] < CLEAR:
            return result
        self.given.model.load_state_dict(start)
        return None

    def _part(self, name: str, recipe: Recipe, label_sets: LabelSets) -> _Training:
        """Return a training of a part, which keeps its state in a folder of this name."""
        folder = self.run_folder and self.run_folder / name
        return self._replace(recipe=recipe, label_sets=label_sets, run_folder=folder, on_epoch=lambda epoch: None)

    def _fit(self, given: Encoder) -> TrainResult:
        """Train an encoder by HCE (Alg. 3); a table is first fitted to the corpus."""
        corpus, recipe = self.corpus, self.recipe
        sources, devset = sources_and_devset(corpus, given, self.label_sets, recipe)
        with _at_work(given, recipe):
            ndcg_before = devset.ndcg(given)
            start = start_encoder(corpus, given, devset, means(ndcg_before), recipe)
        checkpoints = None
        if self.run_folder is not None:
            checkpoints = CheckpointFolder(self.run_folder, _identity(corpus, start, self.label_sets, recipe))
        with _at_work(start, recipe):
            result = co_train(
                *(corpus, start, sources, devset, recipe),
                ndcg_before=ndcg_before,
                checkpoints=checkpoints,
                progress=self.progress,
                on_epoch=self.on_epoch,
            )
        if start.dtype != getattr(torch, recipe.precision):  # the vectors are less precise than the encoder
            result = replace(result, vectors=None)
        stages = {} if start is given else {"fitting": result.history[0].dev}
        if result.mix:
            stages["training"] = result.after
        return replace(result, stages=stages, ndcg_after=result.ndcg_after if stages else ndcg_before)


def start_encoder(
    corpus: Corpus, given: Encoder, devset: DevSet, given_dev: dict[str, float], recipe: Recipe
) -> Encoder:
    """Return F0: the encoder, or its table fitted to the corpus if dev prefers that."""
    if not recipe.fit_static or given.table is None:
        return given
    fitted = given.fitted_to(corpus)
    take_weights_of_the_first(fitted.model.parameters())
    gain = mean_over_kinds(devset.measure(fitted)) - mean_over_kinds(given_dev)
    return fitted if of_the_first({"gain": gain}, given.device)["gain"] > 0 else given


def improvement(result: TrainResult) -> str:
    """Say in one sentence what training did to the dev measure."""
    shares = result.encoder.shares
    if result.after == result.before:
        is_believed = LABELED in result.after or result.recipe.keep != "mix" or result.encoder.is_table
        clearly = "" if is_believed else " clearly"
        return (
            f"training did not{clearly} beat the encoder it started from ({mean_over_kinds(result.before):.4f}), "
            "so that one is returned unchanged"
        )
    gain = f"{result.metric}: {gains(result.before, result.stages, result.after)}"
    if len(shares) > 1:
        return f"{gain}, with {1 - shares[0]:.0%} of a score from companions of the corpus's own"
    if result.mix == 0:
        return f"{gain}; training did not add to it"
    way = "" if result.mix == 1 else f", with {result.mix:.0%} of the way from the first weights to the trained ones"
    return gain + way


def _settled(recipe: Recipe | None, corpus: Corpus, encoder: Encoder, labels: Labels | None) -> Recipe:
    """Return the recipe with mode, train and precision decided."""
    recipe = recipe or Recipe.for_encoder(static=encoder.is_table, documents=len(corpus))
    if recipe.train == "companion" and encoder.is_table:
        raise InputError(f"{encoder.name} is a table itself: train the encoder, or both")
    if recipe.mode not in ("auto", "unsupervised") and labels is None:
        raise InputError(f"mode {recipe.mode!r} needs labeled pairs; give some, or train unsupervised")
    # A token table has no matrix products that bfloat16 would speed up.
    is_table = encoder.is_table or recipe.train in ("auto", "companion")
    is_fast = not is_table and fast_dtype(encoder.device) == torch.bfloat16
    decided: dict[str, Any] = {
        "mode": "unsupervised" if labels is None else "joint",
        "train": "both" if encoder.is_table else "companion",
        "precision": "bfloat16" if is_fast else "float32",
    }
    return replace(recipe, **{name: value for name, value in decided.items() if getattr(recipe, name) == "auto"})


def _tuning(recipe: Recipe, corpus: Corpus, encoder: Encoder, labels: Labels | None) -> Recipe | None:
    """Return the recipe to fine-tune a transformer by labels; None: no fine-tuning."""
    is_open = recipe.train == "auto" and recipe.mode != "unsupervised" and not encoder.is_table
    if not is_open or labels is None or len(labels.qrels) < LEAST_TO_TUNE:
        return None
    pair_count = sum(1 for each in labels.qrels.judgments() if each.grade > 0)
    return _settled(recipe_of_tuning(recipe, min(pair_count, len(corpus))), corpus, encoder, labels)


def memory_needs(
    corpus: Corpus, encoder: Encoder, recipe: Recipe, pairs: Labels | None = None, generated: Labels | None = None
) -> dict[str, int]:
    """Estimate peak bytes by stage, to compare with a memory limit."""
    documents = min(len(corpus), recipe.most_documents or len(corpus))
    needs = {"training": 400 * MiB + documents * (4 * encoder.dim + 1200)}
    tuning = _tuning(recipe, corpus, encoder, pairs) or _settled(recipe, corpus, encoder, pairs or generated)
    if tuning.train != "companion" and not encoder.is_table and encoder.device.type == "cpu":
        needs["fine-tuning"] = needs["training"] + _bytes_to_tune(encoder, tuning)
    return needs


def _bytes_to_tune(encoder: Encoder, recipe: Recipe) -> int:
    """Estimate the bytes of weights, gradients, optimizer state and activations."""
    weights = list(encoder.model.parameters())
    with only_upper_layers(encoder, recipe.frozen):
        trained = sum(each.numel() for each in weights if each.requires_grad)
        matrices = [each for each in encoder.model.modules() if isinstance(each, torch.nn.Linear)]
        kept = sum(each.in_features + each.out_features for each in matrices if each.weight.requires_grad)
    encoded = 2 + recipe.negative_count * (recipe.negatives == "fresh-siblings")  # texts for each pair
    texts = recipe.chunk_size or encoded * recipe.batch_size * (1 + (recipe.mode == "joint"))
    tokens = min(encoder.window, recipe.window * 4 // 3 or LONG_DOCUMENT)  # of a text; three words have four tokens
    # Three copies of all weights: the given ones, those at the start of this training, and the best ones.
    return 4 * (3 * sum(each.numel() for each in weights) + 3 * trained) + BYTES_KEPT * kept * texts * tokens


def _refuse_impossible(corpus: Corpus, encoder: Encoder, recipe: Recipe, log: Sequence[str] | QueryMean) -> None:
    if len(corpus) < 2:
        raise InputError(f"{corpus.name}: training needs at least 2 documents, and there is 1")
    recipe.require_documents(len(corpus))
    has_dropout = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in encoder.model.modules())
    if recipe.train == "companion" and recipe.pseudo == "simcse":
        raise InputError("a companion is a table and has no dropout; use ict, or train the encoder")
    if recipe.mode != "supervised" and recipe.pseudo == "simcse" and not has_dropout:
        raise InputError(f"{encoder.name} has no dropout, so SimCSE would show it the same text twice; use ict")
    if isinstance(log, QueryMean) and not _is_log_useless(encoder, recipe) and log.encoder != encoder.fingerprint:
        raise InputError(f"the mean of queries is of another encoder than {encoder.name}; give the queries themselves")


def _is_log_useless(encoder: Encoder, recipe: Recipe) -> bool:
    return encoder.is_table or recipe.train == "encoder"


def _warn_of_poor_data(corpus: Corpus, encoder: Encoder, recipe: Recipe, log: Sequence[str] | QueryMean) -> None:
    if log and _is_log_useless(encoder, recipe):
        logger.warning(
            "the log of queries changes nothing for %s; only a transformer with companions uses it", encoder.name
        )
    warn_of_language(corpus, encoder.name)
    if recipe.mode == "supervised":
        return
    if len(corpus) < SMALL_CORPUS:
        logger.warning("only %d documents: expect little from training on them", len(corpus))
    some = range(0, len(corpus), max(1, len(corpus) // 200))
    if np.median([len(WORD_OR_MARK.findall(corpus[position].full_text)) for position in some]) < SHORT_DOCUMENT:
        logger.warning(
            "half of the documents have fewer than %d words and marks: spans of them say little, "
            "and labeled or generated queries would help more",
            SHORT_DOCUMENT,
        )


@contextmanager
def _at_work(encoder: Encoder, recipe: Recipe) -> Iterator[None]:
    """Apply the recipe's precision and frozen layers; cache the tokens of texts."""
    with (
        encoder.computing_in(getattr(torch, recipe.precision)),
        encoder.remembering_tokens(),
        only_upper_layers(encoder, recipe.frozen),
    ):
        yield


def _identity(corpus: Corpus, encoder: Encoder, label_sets: LabelSets, recipe: Recipe) -> dict[str, object]:
    """Return what a run must have in common with the unfinished one it resumes."""
    return {
        "corpus": corpus.fingerprint,
        "encoder": encoder.fingerprint,
        "set of labeled pairs": label_sets.labeled and label_sets.labeled.digest,
        "set of generated queries": label_sets.generated and label_sets.generated.digest,
        "set of dev queries": label_sets.dev and label_sets.dev.digest,
        "log of queries": hash64(str(label_sets.log)) if label_sets.log else None,
        **{f"setting {name}": value for name, value in recipe.as_dict().items()},
    }
