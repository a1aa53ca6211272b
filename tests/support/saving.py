"""Checkpoints in the middle of an epoch, and data that goes on where a checkpoint left it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from support.models import batches


class ResumableBatches:
    """Batches, by default ``support.models.batches()``, with a position that Lightning saves and restores."""

    def __init__(self, made: Iterable[Any] | None = None) -> None:
        self.batches = list(batches() if made is None else made)
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.position % len(self), len(self)):
            self.position = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class SaveAt(Callback):
    """Saves ``folder/<global step>.ckpt`` after chosen steps, as ``ModelCheckpoint(every_n_train_steps=)`` would."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")
