"""The state of a training run, to disk and back: continued, it goes on exactly as if it had never stopped."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hce.data.corpus import Corpus
from hce.encoding.encoder import Encoder
from hce.processes import is_first_process
from hce.training.checkpoint import CheckpointFolder, State, flatten_optimizer, restore_optimizer
from hce.training.history import Epoch, Progress
from hce.training.optimise import Sources, Trainer
from hce.training.recipe import Recipe
from hce.tree.clustering import Level
from hce.tree.hierarchy import Hierarchy


@dataclass
class Run:
    """Everything about a run that changes, and so what a checkpoint holds.

    Attributes:
        trainer: encoder, optimiser, objective.
        tree: the present tree.
        vectors: the documents' vectors that it was grown from, of shape (N, n).
        best: the weights that were best on dev.
        best_metric: how good they were.
        history: an entry for each finished epoch.
        progress: how far the present one has come.
        folder: where vectors are kept as files; in memory where there is none.
    """

    trainer: Trainer
    tree: Hierarchy
    vectors: np.ndarray
    best: dict[str, Tensor]
    best_metric: float
    history: list[Epoch]
    progress: Progress = field(default_factory=Progress)
    folder: Path | None = None

    @property
    def tree_epoch(self) -> int:
        """The epoch whose weights the present tree and vectors are of; 0 is F0."""
        return max(epoch.epoch for epoch in self.history if epoch.reclustered or epoch.epoch == 0)


def weights_of(encoder: Encoder) -> dict[str, Tensor]:
    """A copy of the encoder's weights."""
    return {name: tensor.detach().clone() for name, tensor in encoder.model.state_dict().items()}


def save(run: Run, checkpoints: CheckpointFolder | None) -> None:
    """Write all of it to the checkpoint folder, if there is one; of several processes, the first does."""
    if checkpoints is None or not is_first_process():
        return
    trainer = run.trainer
    optimizer = flatten_optimizer(trainer.optimizer, "optimizer")
    centroids = flatten_optimizer(trainer.centroid_optimizer, "centroid_optimizer")
    tensors = {
        **_prefixed("weights", trainer.encoder.model.state_dict()),
        **_prefixed("best", run.best),
        **{f"tree.{t}.parent": torch.from_numpy(level.parent) for t, level in enumerate(run.tree.levels)},
        **{f"tree.{t}.centroids": torch.from_numpy(level.centroids) for t, level in enumerate(run.tree.levels)},
        **{f"moved.{t}": centroid for t, centroid in enumerate(trainer.centroids)},
        "document_parent": torch.from_numpy(run.tree.document_parent),
        **optimizer.tensors,
        **centroids.tensors,
    }
    facts = {
        "history": [asdict(epoch) for epoch in run.history],
        "progress": asdict(run.progress),
        "best_metric": run.best_metric,
        "vectors": vector_file(checkpoints.folder, run.tree_epoch).name,
        "tree": {"mean_cosines": run.tree.mean_cosines, "facts": run.tree.facts},
        "optimizer": optimizer.facts,
        "centroid_optimizer": centroids.facts,
    }
    checkpoints.save(State(tensors, facts))
    for file in checkpoints.folder.glob("vectors-*.npy"):
        if file.name != facts["vectors"]:
            file.unlink(missing_ok=True)


def vector_file(folder: Path, epoch: int) -> Path:
    """Where the vectors of an epoch's weights are kept: in a file of their own, beside the states that name it."""
    return folder / f"vectors-{epoch}.npy"


def resume(
    corpus: Corpus, encoder: Encoder, sources: Sources, recipe: Recipe, checkpoints: CheckpointFolder | None
) -> Run | None:
    """The run that an earlier process left unfinished, if there is one."""
    state = checkpoints.load() if checkpoints is not None else None
    if checkpoints is None or state is None:
        return None
    tensors, facts = state
    encoder.model.load_state_dict(_under("weights", tensors))
    tree = _tree(tensors, facts["tree"])
    trainer = Trainer(corpus, encoder, sources, recipe)
    vectors = np.load(checkpoints.folder / facts["vectors"], mmap_mode="c", allow_pickle=False)
    trainer.use_tree(tree, vectors)
    for t, centroid in enumerate(trainer.centroids):
        centroid.data.copy_(tensors[f"moved.{t}"])
    restore_optimizer(trainer.optimizer, "optimizer", State(tensors, facts["optimizer"]))
    restore_optimizer(trainer.centroid_optimizer, "centroid_optimizer", State(tensors, facts["centroid_optimizer"]))
    best = {name: tensor.to(encoder.device) for name, tensor in _under("best", tensors).items()}
    history = [Epoch(**epoch) for epoch in facts["history"]]
    progress = Progress(**facts["progress"])
    return Run(trainer, tree, vectors, best, facts["best_metric"], history, progress, checkpoints.folder)


def _tree(tensors: dict[str, Tensor], about: dict[str, Any]) -> Hierarchy:
    arrays = {name: tensor.numpy() for name, tensor in _under("tree", tensors).items()}
    levels = tuple(Level(arrays[f"{t}.parent"], arrays[f"{t}.centroids"]) for t in range(len(arrays) // 2))
    parent = tensors["document_parent"].numpy()
    return Hierarchy(levels, parent, tuple(about["mean_cosines"]), about["facts"])


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
