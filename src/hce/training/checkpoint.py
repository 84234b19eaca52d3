"""A training run's state on disk: the last whole one, and nothing else; never pickled.

Tensors go to safetensors, the rest to JSON. A state is written to a folder of its own and then named in `LAST`, which
is replaced atomically: whenever the process dies, `LAST` names a whole state.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hce.atomic import new_folder, open_atomically, write_json
from hce.errors import InputError


class State(NamedTuple):
    """What a checkpoint holds: tensors by name, and facts that JSON can carry."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class CheckpointFolder:
    """The states of one run; only the newest is kept.

    Attributes:
        identity: what the run is of (corpus, encoder, settings, …); a run with another one is not continued.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.identity = identity or {}

    def save(self, state: State) -> None:
        """Write a state; when this returns, it survives a crash.

        Raises:
            InputError: it cannot be written, and the one before it is still there.
        """
        try:
            self._save(state)
        except (OSError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"{self.folder}: the state of the run cannot be written ({reason}); make room and go on with --resume"
            ) from error

    def _save(self, state: State) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        previous = self._last()
        name = f"state-{int(previous.name.split('-')[1]) + 1 if previous else 0}"
        shutil.rmtree(self.folder / name, ignore_errors=True)  # of a run that died before it was named
        with new_folder(self.folder / name) as folder:
            # Copies: two names may share one tensor here, which safetensors refuses.
            tensors = {key: tensor.detach().cpu().clone().contiguous() for key, tensor in state.tensors.items()}
            save_file(tensors, folder / "tensors.safetensors")
            write_json(folder / "facts.json", {"identity": self.identity, **state.facts})
        with open_atomically(self.folder / "LAST") as file:
            file.write(name)
        if previous is not None:
            shutil.rmtree(previous, ignore_errors=True)

    def load(self) -> State | None:
        """The newest whole state, if there is one.

        Raises:
            InputError: it is of a run with another identity.
        """
        last = self._last()
        if last is None:
            return None
        facts = json.loads((last / "facts.json").read_text(encoding="utf-8"))
        found = facts.pop("identity")
        changed = [name for name in self.identity if found.get(name) != self.identity[name]]
        if changed:
            raise InputError(
                f"{self.folder} holds an unfinished run with another {', '.join(changed)}; give the same, or delete it"
            )
        return State(load_file(last / "tensors.safetensors"), facts)

    def remove(self) -> None:
        """Delete all of it, when the run is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _last(self) -> Path | None:
        pointer = self.folder / "LAST"
        return self.folder / pointer.read_text().strip() if pointer.is_file() else None


def flatten_optimizer(optimizer: torch.optim.Optimizer | None, prefix: str) -> State:
    """An optimiser's state as named tensors and facts; nothing of none."""
    tensors: dict[str, Tensor] = {}
    facts: dict[str, Any] = {}
    if optimizer is None:
        return State(tensors, facts)
    for number, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{prefix}.{number}.{key}"] = value
            elif value is not None:
                facts[f"{number}.{key}"] = value
    return State(tensors, facts)


def restore_optimizer(optimizer: torch.optim.Optimizer | None, prefix: str, state: State) -> None:
    """Put back what `flatten_optimizer` took."""
    if optimizer is None:
        return
    restored: dict[int, dict[str, Any]] = {}
    for name, tensor in state.tensors.items():
        if name.startswith(f"{prefix}."):
            number, key = name.removeprefix(f"{prefix}.").split(".", 1)
            restored.setdefault(int(number), {})[key] = tensor
    for name, value in state.facts.items():
        number, key = name.split(".", 1)
        restored.setdefault(int(number), {})[key] = value
    optimizer.load_state_dict({"state": restored, "param_groups": optimizer.state_dict()["param_groups"]})
