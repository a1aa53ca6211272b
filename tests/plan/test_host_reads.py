"""Complaint 6 (PL 21589): what the plan asks of the device, counted in operators, beside stock Lightning's own loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from support.counting import HostReads
from support.models import Regression
from support.oracles import plan_for
from support.running import fit


class Unread(Regression):
    """Regression that never looks at a number itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx in self.overflow_at:
            loss = loss + (self.net[3].weight.sum() * 0) * float("inf")
        return loss


class CountReads(Callback):
    """Host reads of each training batch, from before its first hook to after its last."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._reads = HostReads()
        self._reads.__enter__()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._reads.__exit__(None, None, None)
        self.counts.append(self._reads.count)


def _counts(module: LightningModule, **options: Any) -> list[int]:
    reads = CountReads()
    fit(module, callbacks=[reads], **options)
    return reads.counts


FUSED = {
    "adamw": partial(AdamW, lr=1e-2, fused=True),
    "sgd-momentum": partial(SGD, lr=1e-2, momentum=0.9, fused=True),
}
PLAIN = {
    "adamw": partial(AdamW, lr=1e-2, eps=1e-4),
    "sgd-momentum": partial(SGD, lr=1e-2, momentum=0.9, foreach=True),
}
CLIPS: dict[str, dict[str, Any]] = {
    "no clip": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
}
modes = pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed", "16-true"])


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", FUSED)
@modes
def test_none_with_a_fused_optimizer(mode: str, optimizer: str, clip: str) -> None:
    """Absolutely none, Lightning's loop included, once the optimizer has its state; on a skipped step neither."""
    module = Unread(FUSED[optimizer], overflow_at=(4,))
    assert _counts(module, plugins=[plan_for(mode)], **CLIPS[clip])[1:] == [0] * 7


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", PLAIN)
@modes
def test_at_most_one_with_a_plain_optimizer(mode: str, optimizer: str, clip: str) -> None:
    """Stock 32-true is the measure: what a plain optimizer reads by itself (its step count) is not the plan's."""
    stock = _counts(Unread(PLAIN[optimizer]), precision="32-true", **CLIPS[clip])
    ours = _counts(Unread(PLAIN[optimizer]), plugins=[plan_for(mode)], **CLIPS[clip])
    assert all(mine - theirs <= 1 for mine, theirs in zip(ours[1:], stock[1:], strict=True))


@modes
def test_at_most_one_where_a_scheduler_is_held(mode: str) -> None:
    schedule = partial(OneCycleLR, max_lr=1e-2, total_steps=9, cycle_momentum=False)
    stock = _counts(Unread(FUSED["adamw"], schedule), precision="32-true")
    ours = _counts(Unread(FUSED["adamw"], schedule, overflow_at=(3,)), plugins=[plan_for(mode)])
    assert all(mine - theirs <= 1 for mine, theirs in zip(ours[1:], stock[1:], strict=True))
