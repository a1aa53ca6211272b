"""A step whose gradients overflow changes nothing, is counted, and lets the run go on as if it had not been."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, AdamW

from lightning_mp import LossScaling
from lightning_mp.compat.lightning import Callback, LightningModule, Trainer
from support import optimizers
from support.models import Regression, same_weights
from support.nonfinite import without
from support.oracles import CALM_SCALE, MODES, plan_for
from support.running import fit
from support.traces import equal_states, traced

pytestmark = pytest.mark.older_cpu
OPTIMIZERS: dict[str, Any] = {
    "adamw": partial(AdamW, lr=1e-2, eps=1e-4),
    "adamw-fused": partial(AdamW, lr=1e-2, eps=1e-4, fused=True),
    "sgd-momentum": partial(SGD, lr=1e-3, momentum=0.9, nesterov=True),
    "sgd-momentum-fused": partial(SGD, lr=1e-3, momentum=0.9, fused=True),
    "adagrad-fused": partial(Adagrad, lr=1e-2, fused=True),
    **optimizers.OPTIMIZERS,
    **optimizers.CLAIM_TO_SKIP,
}
STEPS = 8
every_mode = pytest.mark.parametrize("mode", MODES)
static = LossScaling.static(256.0)  # the same scale with and without the bad step, so that fp16 rounds the same
#: torch's fused SGD (2.13, CPU) does not train half parameters at all, and is left out of the true modes
REPEATABLE = [
    *(("16-mixed", optimizer) for optimizer in OPTIMIZERS),
    *((mode, "adamw-fused") for mode in MODES if mode != "16-mixed"),
    *((mode, optimizer) for mode in ("32-true", "bf16-mixed") for optimizer in optimizers.CLAIM_TO_SKIP),
]


@pytest.mark.parametrize("bad", [(0, 1), (2, STEPS - 1)])
@pytest.mark.parametrize(("mode", "optimizer"), REPEATABLE)
def test_the_run_equals_one_without_it(mode: str, optimizer: str, bad: tuple[int, ...]) -> None:
    """Weights and all optimizer state. Complaint 6 (PL 21928): in bf16 and fp32 too, a non-finite step is left out."""
    plan = plan_for(mode, static)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory, as of a first step's state, with NaN
    try:
        here = traced(Regression(OPTIMIZERS[optimizer], overflow_at=bad), plugins=[plan])
    finally:
        torch.use_deterministic_algorithms(False)
    there = traced(Regression(OPTIMIZERS[optimizer]), plugins=[plan_for(mode, static)], data=without(*bad))
    assert plan.skipped_steps == len(bad)
    assert same_weights(here.weights[-1], there.weights[-1])
    assert equal_states(here.states[-1], there.states[-1])
    assert [loss for step, loss in enumerate(here.module.losses) if step not in bad] == there.module.losses


def test_a_real_fp16_overflow_is_skipped() -> None:
    """Not a planted infinity: at scale 2**24 fp16 gradients of this model exceed 65,504 by themselves."""
    trace = traced(Regression(), plugins=[plan_for("16-mixed", LossScaling(init_scale=2.0**24))], max_epochs=4)
    first = trace.skipped.index(False)
    assert first > 2
    assert all(same_weights(trace.start, weights) for weights in trace.weights[:first])
    assert trace.scales[:first] == [2.0 ** (23 - step) for step in range(first)]
    assert not same_weights(trace.start, trace.weights[first])


class Restarts(Callback):
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            trainer.strategy.setup_optimizers(trainer)


def test_a_run_whose_optimizers_are_made_anew_goes_on_under_its_scale() -> None:
    plan = plan_for("16-mixed", LossScaling(init_scale=2.0**10, growth_interval=3))
    fit(Regression(overflow_at=(6,)), plugins=[plan], callbacks=[Restarts()])
    assert (plan.applied_steps, plan.skipped_steps) == (STEPS - 1, 1)
    assert plan.scaler.get_scale() == 2.0**11, "2**12 after six clean steps, halved by the seventh"


class Watched(Regression):
    def __init__(self, bad: int) -> None:
        super().__init__()
        self.bad = bad

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        if self.batch_idx == self.bad:
            self.net[3].bias.grad.fill_(float("inf"))


@pytest.mark.parametrize("batch", [0, 4, 7])
@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed", "16-true"])
def test_an_overflow_spoils_its_window_alone(mode: str, batch: int) -> None:
    plan = plan_for(mode)
    trace = traced(Watched(batch), plugins=[plan], accumulate_grad_batches=3)
    bad = batch // 3
    after = [trace.weights[2], trace.weights[5], trace.weights[7]]
    before = [trace.start, *after[:2]]
    assert [same_weights(a, b) for a, b in zip(before, after, strict=True)] == [bad == w for w in range(3)]
    assert (plan.applied_steps, plan.skipped_steps) == (2, 1)
    if trace.scales:
        assert trace.scales[-1] == CALM_SCALE / 2


class Declines(Regression):
    def __init__(self, *declined: int) -> None:
        super().__init__(OPTIMIZERS["adamw-fused"])
        self.declined = declined

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx in self.declined else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`:UserWarning")
@pytest.mark.parametrize(
    ("declined", "accumulate", "applied"),
    [
        ((0,), 1, 7),
        ((3, 4), 1, 6),
        ((7,), 1, 7),
        (tuple(range(8)), 1, 0),
        ((0,), 2, 4),  # the window's other batch is stepped
        ((0, 1), 2, 3),  # a window without any
        ((7,), 3, 3),  # in the last, partial window
        ((6, 7), 3, 2),
    ],
)
@pytest.mark.parametrize("mode", ["32-true", "16-mixed"])
def test_a_training_step_that_returns_none_is_neither_applied_nor_skipped(
    mode: str, declined: tuple[int, ...], accumulate: int, applied: int
) -> None:
    plan = plan_for(mode)
    trace = traced(Declines(*declined), plugins=[plan], accumulate_grad_batches=accumulate)
    assert (plan.applied_steps, plan.skipped_steps) == (applied, 0)
    if trace.scales:
        assert set(trace.scales) == {CALM_SCALE}
    if accumulate == 1:
        for batch in declined:
            assert same_weights(trace.weights[batch], trace.weights[batch - 1] if batch else trace.start)
