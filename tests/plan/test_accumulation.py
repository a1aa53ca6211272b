"""Micro-batches add up under the scale, in the right sum; what overflows spoils its own window and no other."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor
from torch.optim import AdamW

from support.models import Regression, same_weights
from support.oracles import CALM_SCALE, plan_for
from support.running import fit
from support.traces import Trace

pytestmark = pytest.mark.older_cpu


class Watched(Regression):
    """One batch's gradients are infinite."""

    def __init__(self, *arguments: Any, overflow_in_batch: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.bad_batches = overflow_in_batch
        self.seen_batches = 0

    def on_after_backward(self) -> None:
        if self.seen_batches in self.bad_batches:
            self.net[3].bias.grad.fill_(float("inf"))
        self.seen_batches += 1


@pytest.mark.parametrize("batch", [0, 4, 7])
@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed", "16-true"])
def test_an_overflow_spoils_its_window_alone(mode: str, batch: int) -> None:
    """Windows of 3, 3 and 2 micro-batches: whichever of them holds the bad one is skipped whole."""
    module, trace, plan = Watched(overflow_in_batch=(batch,)), Trace(), plan_for(mode)
    fit(module, plugins=[plan], callbacks=[trace], accumulate_grad_batches=3)
    bad = batch // 3
    after = [trace.weights[2], trace.weights[5], trace.weights[7]]
    before = [trace.start, *after[:2]]
    assert [same_weights(a, b) for a, b in zip(before, after, strict=True)] == [bad == w for w in range(3)]
    assert (plan.applied_steps, plan.skipped_steps) == (2, 1)
    if trace.scales:
        assert trace.scales[-1] == CALM_SCALE / 2


class Declines(Regression):
    """Its ``training_step`` returns ``None`` for chosen batches."""

    def __init__(self, *declined: int, **options: Any) -> None:
        super().__init__(partial(AdamW, lr=1e-2, eps=1e-4, fused=True), **options)
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
    plan, trace = plan_for(mode), Trace()
    fit(Declines(*declined), plugins=[plan], callbacks=[trace], accumulate_grad_batches=accumulate)
    assert (plan.applied_steps, plan.skipped_steps) == (applied, 0)
    if trace.scales:
        assert set(trace.scales) == {CALM_SCALE}
    if accumulate == 1:
        for batch in declined:
            assert same_weights(trace.weights[batch], trace.weights[batch - 1] if batch else trace.start)
