"""The faults: each a callback that spoils a healthy run from one step on, and knows what it spoiled."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from faults.model import Batches, Patient

#: where an overflow in fp16, or a weight that is not a number, is put; one of them by seed
LAYERS = (
    "model.transformer.h.0.attn.c_attn",
    "model.transformer.h.0.mlp.c_fc",
    "model.transformer.h.1.attn.c_proj",
    "model.transformer.h.1.mlp.c_fc",
    "model.transformer.h.1.mlp.c_proj",
)
#: seconds that every batch is waited for, at least
WAIT = 1.0
#: and at least so many of the slowest step before: where the machine's own stalls are as long as the wait, the rule
#: rightly asks for more readings in a row
STALLS = 4.0


class Injection(Callback):
    """Does :meth:`spoil` when step ``at`` begins; ``module`` and ``rank`` are what has to be named, if anything."""

    module: str | None = None
    rank: int | None = None

    def __init__(self, seed: int, at: int) -> None:
        self.seed, self.at = seed, at

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert isinstance(pl_module, Patient)
        step = trainer.global_step
        if step == self.at and self.rank in (None, trainer.global_rank):
            self.spoil(trainer, pl_module)
        if step > self.at:
            self.after(pl_module)

    def prepare(self, data: Batches) -> None:
        """Faults that lie in the data."""

    def spoil(self, trainer: Trainer, patient: Patient) -> None:
        """Faults that begin with a step."""

    def after(self, patient: Patient) -> None:
        """Faults that end with it."""


class Overflow(Injection):
    """A layer whose product is beyond fp16's 65,504, and finite in fp32."""

    def __init__(self, seed: int, at: int) -> None:
        super().__init__(seed, at)
        self.module = LAYERS[seed % len(LAYERS)]

    def spoil(self, trainer: Trainer, patient: Patient) -> None:
        with torch.no_grad():
            patient.get_submodule(self.module or "").weight.mul_(1e6)  # type: ignore[operator]


class NotANumber(Injection):
    """One weight of a layer."""

    def __init__(self, seed: int, at: int) -> None:
        super().__init__(seed, at)
        self.module = LAYERS[seed % len(LAYERS)]

    def spoil(self, trainer: Trainer, patient: Patient) -> None:
        weight: Any = patient.get_submodule(self.module or "").weight
        with torch.no_grad():
            weight[seed_index(self.seed, weight.shape[0]), seed_index(self.seed + 1, weight.shape[1])] = float("nan")


class OneRank(NotANumber):
    """The same on the last of two ranks alone."""

    rank = 1


class BadBatch(Injection):
    """One batch in other units: everything a thousand times as large."""

    def prepare(self, data: Batches) -> None:
        data.change = lambda number, batch: [1000 * part for part in batch] if number == self.at else batch


class GradientSpike(Injection):
    """One step whose gradients are a hundred times as large."""

    def spoil(self, trainer: Trainer, patient: Patient) -> None:
        patient.gradient_factor = 100.0

    def after(self, patient: Patient) -> None:
        patient.gradient_factor = 1.0


class HighRate(Injection):
    """A learning rate thirty times as high, from one step on."""

    def spoil(self, trainer: Trainer, patient: Patient) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 30


class DeadLearning(Injection):
    """A learning rate of nothing."""

    def spoil(self, trainer: Trainer, patient: Patient) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.0


class AlwaysOverflowing(Injection):
    """Gradients that are infinite at every scale."""

    def spoil(self, trainer: Trainer, patient: Patient) -> None:
        patient.gradient_factor = float("inf")


class SlowData(Injection):
    """Every batch is waited for, longer than the machine itself has let the run wait so far."""

    def prepare(self, data: Batches) -> None:
        self.asked_at: list[float] = []
        data.before = self.wait

    def wait(self, number: int) -> None:
        if number < self.at:
            self.asked_at.append(time.perf_counter())
            return
        # the first step is not one of the readings that the rule compares with
        steps = [after - before for before, after in pairwise(self.asked_at[2:])]
        time.sleep(max(WAIT, STALLS * max(steps)))


def seed_index(seed: int, size: int) -> int:
    """A number below ``size`` that looks like no other seed's."""
    return (seed * 7919 + 13) % size
