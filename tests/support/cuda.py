"""What the CUDA tests share: a fit on the first GPU whose batches lie there already, so that no copy waits for it.

``tests/gpu`` has what only kernels can show: numbers, memory and clocks. What the host does is in ``tests/cuda_path``.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from support.models import Regression, batches
from support.running import trainer

ACCELERATOR, DEVICE = "gpu", "cuda"


class Resident:
    """Batches that lie on the device already; a plain list of them would be several loaders to Lightning."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.batches = [[tensor.to(DEVICE) for tensor in batch] for batch in loader]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def cuda_fit(module: LightningModule, **arguments: Any) -> Trainer:
    data, path = arguments.pop("data", None), arguments.pop("ckpt_path", None)
    runner = trainer(**{"accelerator": ACCELERATOR, **arguments})
    runner.fit(module, Resident(batches()) if data is None else data, ckpt_path=path)
    return runner


class Unread(Regression):
    """Regression that never looks at a number itself, so that nothing but the loop could wait for the device."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx in self.overflow_at:
            loss = loss + (self.net[3].weight.float().sum() * 0) * float("inf")
        return loss


class NothingWaits(Callback):
    """Makes every synchronising operation of a training batch an error, from the third batch on."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if batch_idx >= 2 else "default")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
