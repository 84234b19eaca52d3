"""The state of a training run and its checkpoints: a resumed run ends exactly like an uninterrupted one.

Tensors are saved as safetensors, the rest as JSON; nothing is pickled. Each checkpoint gets a new folder. Then the file
`LAST`, which names it, is replaced atomically. So whenever the process dies, `LAST` names a complete checkpoint.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hce.contained import check_tree
from hce.errors import FormatError, InputError, one_line, system_reason
from hce.files import checked_fields, make_folder, new_folder, open_atomically, other_identity, read_json, write_json
from hce.processes import is_first_process
from hce.training.model_folder import MAY_BE_NAN, Epoch
from hce.training.steps import Counters, Trainer
from hce.tree.hierarchy import Hierarchy, Level

Restored = TypeVar("Restored")
COUNTER_NAMES = {"steps_in_epoch": "batch", "steps_in_all": "step"}  # in checkpoints


@dataclass
class TrainingRun:
    """Everything that changes during a run; checkpoints hold it."""

    trainer: Trainer
    tree: Hierarchy
    vectors: np.ndarray  # the documents' vectors that the tree was grown from, of shape (N, n)
    best_weights: dict[str, Tensor]  # the best on dev so far; `best` in checkpoints
    best_metric: float  # their dev metric, m in Alg. 3
    history: list[Epoch]  # an entry for each finished epoch
    counters: Counters = field(default_factory=Counters)  # how far the run has come
    checkpoints: CheckpointFolder | None = None  # where the state and the vectors are kept; None: in memory only
    measured: dict[str, np.ndarray] | None = None  # NDCG@10 by the last epoch's weights; None before and after a resume

    @property
    def tree_epoch(self) -> int:
        """The epoch whose weights gave the current tree and vectors; 0 is F0."""
        return max(epoch.epoch for epoch in self.history if epoch.reclustered or epoch.epoch == 0)

    def save(self) -> None:
        """Write a checkpoint, if there is a folder for it and this process is the first."""
        if self.checkpoints is None or not is_first_process():
            return
        trainer, levels = self.trainer, self.tree.levels
        optimizer = optimizer_state(trainer.optimizer, "optimizer")
        centroid_optimizer = optimizer_state(trainer.centroid_optimizer, "centroid_optimizer")
        tensors = {
            **prefixed("weights", trainer.encoder.model.state_dict()),
            **prefixed("best", self.best_weights),
            **{f"tree.{t}.parent": torch.from_numpy(level.parent) for t, level in enumerate(levels)},
            **{f"tree.{t}.centroids": torch.from_numpy(level.centroids) for t, level in enumerate(levels)},
            **{f"moved.{t}": centroid for t, centroid in enumerate(trainer.centroids)},
            "document_parent": torch.from_numpy(self.tree.document_parent),
            **optimizer.tensors,
            **centroid_optimizer.tensors,
        }
        facts = {
            "history": [asdict(epoch) for epoch in self.history],
            "progress": {COUNTER_NAMES.get(name, name): value for name, value in asdict(self.counters).items()},
            "best_metric": self.best_metric,
            "vectors": self.checkpoints.vectors_folder(self.tree_epoch).name,
            "tree": {"mean_cosines": self.tree.mean_cosines, "facts": self.tree.facts},
            "optimizer": optimizer.facts,
            "centroid_optimizer": centroid_optimizer.facts,
        }
        self.checkpoints.save(Checkpoint(tensors, facts))


def unfinished_run(trainer: Trainer, checkpoints: CheckpointFolder | None) -> TrainingRun | None:
    """Return the run that an earlier process left, loaded into the trainer.

    Fails if the unfinished run has another identity, or its state is damaged.
    """
    return None if checkpoints is None else checkpoints.resume(partial(_resumed, trainer, checkpoints))


def _resumed(trainer: Trainer, checkpoints: CheckpointFolder, checkpoint: Checkpoint) -> TrainingRun:
    """Load a checkpoint into a trainer."""
    tensors, facts = checkpoint
    trainer.encoder.model.load_state_dict(under("weights", tensors))
    arrays = {name: tensor.numpy() for name, tensor in under("tree", tensors).items()}
    levels = tuple(Level(arrays[f"{t}.parent"], arrays[f"{t}.centroids"]) for t in range(len(arrays) // 2))
    about, parent = facts["tree"], tensors["document_parent"].numpy()
    tree = Hierarchy(levels, parent, tuple(about["mean_cosines"]), about["facts"])
    vectors, width = np.empty((len(tree), 0), dtype=np.float32), 0
    if trainer.recipe.needs_vectors:
        vectors = np.load(checkpoints.vectors_named(facts["vectors"]), mmap_mode="c", allow_pickle=False)
        width = trainer.encoder.dim
    if vectors.dtype != np.float32 or vectors.shape != (len(tree), width):
        raise FormatError(f"{facts['vectors']} holds {vectors.dtype} of shape {vectors.shape}")
    trainer.use_tree(tree, vectors)
    for t, centroid in enumerate(trainer.centroids):
        centroid.data.copy_(tensors[f"moved.{t}"])
    restore_optimizer(trainer.optimizer, under("optimizer", tensors), facts["optimizer"])
    restore_optimizer(trainer.centroid_optimizer, under("centroid_optimizer", tensors), facts["centroid_optimizer"])
    best_weights = {name: tensor.to(trainer.encoder.device) for name, tensor in under("best", tensors).items()}
    history = [checked_fields(Epoch, epoch, may_be_nan=MAY_BE_NAN) for epoch in facts["history"]]
    names = {kept: name for name, kept in COUNTER_NAMES.items()}
    progress = {names.get(name, name): value for name, value in facts["progress"].items()}
    counters = checked_fields(Counters, progress, may_be_nan=["sums"])
    best_metric = float(facts["best_metric"])
    return TrainingRun(trainer, tree, vectors, best_weights, best_metric, history, counters, checkpoints)


class Checkpoint(NamedTuple):
    """The content of a checkpoint: tensors by name, and facts as JSON."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class CheckpointFolder:
    """The newest checkpoint of a run and the vectors that it names; older ones are deleted.

    Attributes:
        identity: corpus, encoder, labels and settings; a run with another identity is not continued.
    """

    def __init__(self, folder: str | Path, identity: Mapping[str, Any]) -> None:
        self.folder = Path(folder)
        self.identity = identity

    def vectors_folder(self, clustering_number: int) -> Path:
        """Return the folder of vectors for a clustering, see `cluster_corpus`."""
        return self.folder / f"vectors-{clustering_number}"

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint that survives a crash; if this fails, the last one stays."""
        try:
            self._save(checkpoint)
        except (OSError, InputError) as error:
            raise InputError(
                f"{self.folder}: the state of the run cannot be written ({system_reason(error) or error}); "
                "make room and go on with --resume"
            ) from error

    def _save(self, checkpoint: Checkpoint) -> None:
        make_folder(self.folder)
        previous = self._last()
        name = f"state-{int(previous.name.split('-')[1]) + 1 if previous else 0}"
        shutil.rmtree(self.folder / name, ignore_errors=True)  # left by a run that died before `LAST` named it
        with new_folder(self.folder / name) as folder:
            # Copies, because safetensors refuses two names that share a tensor.
            tensors = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in checkpoint.tensors.items()}
            save_file(tensors, folder / "tensors.safetensors")
            write_json(folder / "facts.json", {"identity": self.identity, **checkpoint.facts})
        with open_atomically(self.folder / "LAST") as file:
            file.write(name)
        for folder in [*self.folder.glob("state-*"), *self.folder.glob("vectors-*")]:
            if folder.name not in (name, checkpoint.facts.get("vectors")):
                shutil.rmtree(folder, ignore_errors=True)

    def load(self) -> Checkpoint | None:
        """Read the newest complete checkpoint; fail if it belongs to a different run."""
        check_tree(self.folder)
        last = self._last()
        if last is None:
            return None
        facts = read_json(last / "facts.json")
        changed = other_identity(self.identity, facts.pop("identity"))
        if changed:
            raise InputError(
                f"{self.folder} holds an unfinished run with another {changed}; give the same, or delete it"
            )
        return Checkpoint(load_file(last / "tensors.safetensors"), facts)

    def resume(self, restore: Callable[[Checkpoint], Restored]) -> Restored | None:
        """Apply `restore` to the newest checkpoint; return None without one.

        Fails if the run has another identity, or its state is damaged.
        """
        try:
            checkpoint = self.load()
            return None if checkpoint is None else restore(checkpoint)
        except InputError:
            raise
        except Exception as error:  # readers of damaged files raise many kinds
            raise FormatError(
                f"{self.folder}: the state of the run is damaged ({one_line(error)}); "
                "delete this folder and train from the start"
            ) from error

    def vectors_named(self, name: str) -> Path:
        """Return the file of vectors in a folder that a checkpoint names."""
        if not re.fullmatch(r"vectors-[0-9]+", name):
            raise FormatError(f"{name!r} is no folder of vectors")
        return self.folder / name / "vectors.npy"

    def _last(self) -> Path | None:
        pointer = self.folder / "LAST"
        if not pointer.is_file():
            return None
        name = pointer.read_text(encoding="utf-8").strip()
        if not re.fullmatch(r"state-[0-9]+", name):
            raise FormatError(f"{pointer}: {name[:40]!r} names no state")
        return self.folder / name


def optimizer_state(optimizer: torch.optim.Optimizer | None, prefix: str) -> Checkpoint:
    """Flatten an optimizer's state to tensors PREFIX.NUMBER.KEY and facts."""
    checkpoint = Checkpoint({}, {})
    for number, values in optimizer.state_dict()["state"].items() if optimizer is not None else ():
        for key, value in values.items():
            if isinstance(value, Tensor):
                checkpoint.tensors[f"{prefix}.{number}.{key}"] = value
            elif value is not None:
                checkpoint.facts[f"{number}.{key}"] = value
    return checkpoint


def restore_optimizer(
    optimizer: torch.optim.Optimizer | None, tensors: dict[str, Tensor], facts: dict[str, Any]
) -> None:
    """Restore what `optimizer_state` returned; tensor names come without the prefix."""
    if optimizer is None:
        return
    restored: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **facts}.items():
        number, key = name.split(".", 1)
        restored.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put a prefix and a dot before the name of each tensor."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors with a prefix, and remove it from their names."""
    dotted = f"{prefix}."
    return {name.removeprefix(dotted): tensor for name, tensor in tensors.items() if name.startswith(dotted)}
