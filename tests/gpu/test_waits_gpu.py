"""Complaint 6 (PL 21589) where it costs something: in a warm step with a fused optimizer nothing waits for the GPU.

``torch.cuda.set_sync_debug_mode("error")`` is the judge: any operation that synchronises raises.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD, Adagrad, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from lightning_mp import LossScaling
from support.cuda import Unread, cuda_fit
from support.oracles import plan_for, stock_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WARM_UP = 2
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(AdamW, lr=1e-2, fused=True),
    "sgd-momentum": partial(SGD, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": partial(Adagrad, lr=1e-2, fused=True),
}
CLIPS: dict[str, dict[str, Any]] = {
    "no clip": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
}


class NothingWaits(Callback):
    """Makes every synchronising operation of a training batch an error, once it is warm."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx >= WARM_UP:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def _fit(module: Any, **options: Any) -> None:
    try:
        cuda_fit(module, callbacks=[NothingWaits()], **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_a_warm_step_never_waits_skipped_or_not(mode: str, optimizer: str, clip: str) -> None:
    plan = plan_for(mode)
    _fit(Unread(OPTIMIZERS[optimizer], overflow_at=(4,)), plugins=[plan], **CLIPS[clip])
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)


@pytest.mark.parametrize(
    "rule",
    [
        LossScaling.megatron(initial_scale=4.0, growth_interval=2),
        LossScaling.deepspeed(initial_scale_power=2, loss_scale_window=2, at_min="hold"),
        LossScaling.static(4.0),
    ],
    ids=["megatron", "deepspeed", "static"],
)
def test_no_rule_of_the_scale_waits(rule: LossScaling) -> None:
    _fit(Unread(OPTIMIZERS["adamw"], overflow_at=(3, 4)), plugins=[plan_for("16-mixed", rule)])


def test_accumulation_does_not_wait() -> None:
    _fit(Unread(OPTIMIZERS["adamw"]), plugins=[plan_for("16-mixed")], accumulate_grad_batches=2)


@pytest.mark.parametrize(
    ("build", "schedule", "plugin"),
    [
        # stock 16-mixed asks for the flag before a plain optimizer
        (partial(SGD, lr=1e-2), None, lambda: stock_for("16-mixed", "cuda")),
        # so does the plan; and where a scheduler is held exactly
        (partial(SGD, lr=1e-2), None, lambda: {"plugins": [plan_for("16-mixed")]}),
        (
            OPTIMIZERS["adamw"],
            partial(OneCycleLR, max_lr=1e-2, total_steps=9),
            lambda: {"plugins": [plan_for("16-mixed")]},
        ),
    ],
    ids=["stock", "plain optimizer", "held scheduler"],
)
def test_the_judge_sees_the_reads_that_are_there(build: Any, schedule: Any, plugin: Any) -> None:
    with pytest.raises(RuntimeError, match="synchroniz"):
        _fit(Unread(build, schedule), **plugin())
