"""Loads the last good checkpoint in the middle of a run, while loops and data continue."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_mp.compat.lightning import ModelCheckpoint, Trainer, checkpoint_connector, last_saved
from lightning_mp.engines import reduce
from lightning_mp.errors import Faults
from lightning_mp.numerics import nonfinite


def check(trainer: Trainer, given: str, instead: str, faults: Faults) -> None:
    """Add a fault if the Trainer writes no checkpoint to go back to, as ``given`` asks for."""
    if not any(not callback.save_weights_only for callback in _writers(trainer)):
        faults.add(
            f"{given} without a ModelCheckpoint that saves optimizer states",
            "a checkpoint to go back to",
            f"add ModelCheckpoint(every_n_train_steps=...) to the callbacks, or use {instead}",
        )


class Checkpoints:
    """The checkpoints that the Trainer's ``ModelCheckpoint`` callbacks wrote, as far as they are still there."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, trainer: Trainer) -> None:
        """Note what was written since the last call: a callback without ``monitor`` knows its last one only."""
        for callback in (writer for writer in _writers(trainer) if not writer.save_weights_only):
            last = last_saved(callback)
            self._seen |= {last, callback.best_model_path, callback.last_model_path, *callback.best_k_models}

    def rewind(self, trainer: Trainer) -> str | None:
        """Load the newest one with finite weights: weights, optimizers, schedulers and the precision's state.

        ``trainer.global_step``, loops, data and callbacks continue from where they are. Every rank has to call it. The
        path, or ``None`` where there is no such checkpoint; weights then are those of the oldest.
        """
        self.note(trainer)
        for path in self._newest_first(trainer):
            _load(trainer, path)
            bad = nonfinite.from_parameters(trainer.lightning_module) is not None
            flag = torch.full((), float(bad), dtype=torch.float32, device=trainer.strategy.root_device)
            if trainer.world_size > 1:
                reduce.max_over_ranks_(flag)
            if not flag.item():
                return path
        return None

    def _newest_first(self, trainer: Trainer) -> list[str]:
        """As the first rank sees it."""
        found = {path: Path(path).stat().st_mtime_ns for path in self._seen if path and Path(path).exists()}
        return trainer.strategy.broadcast(sorted(found, key=lambda path: found[path], reverse=True))


def _writers(trainer: Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _load(trainer: Trainer, path: str) -> None:
    with checkpoint_connector(trainer) as connector:
        connector.resume_start(path, weights_only=False)  # this run has written it
        connector.restore_model()
        connector.restore_precision_plugin_state()
        connector.restore_optimizers_and_schedulers()
        connector.resume_end()
