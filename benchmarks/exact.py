"""Figures that are counted, not timed: host reads a step, and whether weights equal stock Lightning's bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import Precision
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fit import fit
from benchmarks.shapes import SHAPES, Tiny

STEPS, WARM_UP = 20, 2


class HostReads(TorchDispatchMode, Callback):
    """Counts ``aten::_local_scalar_dense``, what a read of a device scalar comes to, within each warm batch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, and count it if it reads."""
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin to watch."""
        if batch_idx >= WARM_UP:
            self.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Stop watching."""
        if batch_idx >= WARM_UP:
            self.__exit__(None, None, None)


class Scheduled(Tiny):
    """The tiny net with the optimizer ``fused`` or not, and a step-interval schedule or none."""

    def __init__(self, fused: bool, scheduled: bool) -> None:
        super().__init__()
        self._fused, self._scheduled = fused, scheduled

    def configure_optimizers(self) -> Any:
        """AdamW, with OneCycleLR if asked for."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self._fused)
        if not self._scheduled:
            return optimizer
        schedule = OneCycleLR(optimizer, max_lr=1e-3, total_steps=STEPS + 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _fit(module: Any, plugin: Precision | None, callbacks: list[Callback]) -> None:
    fit(module, SHAPES[1].data(), plugin, STEPS, callbacks=callbacks, gradient_clip_val=1.0)


def host_reads(plugin: Precision | None, *, fused: bool, scheduled: bool) -> float:
    """Host reads a warm step, norm clipping on."""
    reads = HostReads()
    _fit(Scheduled(fused, scheduled), plugin, [reads])
    return reads.count / (STEPS - WARM_UP)


def same_as_stock(stock: Callable[[], Precision | None], plan: Callable[[], Precision]) -> bool:
    """Whether ``STEPS`` steps of plain AdamW with clipping leave the same bits in every weight."""
    weights: list[list[torch.Tensor]] = []
    for plugin in (stock, plan):
        torch.manual_seed(0)
        module = Scheduled(fused=False, scheduled=False)
        _fit(module, plugin(), [])
        weights.append([parameter.detach().cpu() for parameter in module.parameters()])
    return all(map(torch.equal, *weights))


READS = {
    "fused AdamW": partial(host_reads, fused=True, scheduled=False),
    "fused AdamW, OneCycleLR": partial(host_reads, fused=True, scheduled=True),
    "plain AdamW": partial(host_reads, fused=False, scheduled=False),
}
