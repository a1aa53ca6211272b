"""Optimizers that evaluate their closure again within a step: they run as under stock Lightning, unchecked."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD

from lightning_mp import MixedPrecisionPlan
from support.manual import Manual
from support.models import Regression, same_weights, weights
from support.running import fit


class Extrapolates(SGD):
    """Takes the gradient ahead of the weights, as schedule-free's closure form does, unseen by autograd."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        moves = []
        for parameter in (one for group in self.param_groups for one in group["params"]):
            ahead = self.state[parameter].get("momentum_buffer", torch.zeros_like(parameter)) * 0.05
            parameter.data.add_(ahead)
            moves.append((parameter, ahead))
        loss = closure()
        for parameter, ahead in moves:
            parameter.data.sub_(ahead)
        super().step()
        return loss


OPTIMIZERS: dict[str, Any] = {
    "ahead": partial(Extrapolates, lr=1e-2, momentum=0.9),
    "LBFGS": partial(LBFGS, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_forward_sees_the_weights_it_sees_under_stock(name: str, mode: str) -> None:
    """To the bit, in each of the losses and in the weights."""
    runs, plan = [Regression(OPTIMIZERS[name]), Regression(OPTIMIZERS[name])], MixedPrecisionPlan(mode)
    options = {"accumulate_grad_batches": 2 if name == "ahead" else 1}
    for module, host in zip(runs, ({"precision": mode}, {"plugins": [plan]}), strict=True):
        trainer = fit(module, **options, **host)
    assert runs[0].losses == runs[1].losses
    assert same_weights(*map(weights, runs))
    assert (plan.applied_steps, plan.skipped_steps, plan.step_skipped) == (trainer.global_step, 0, False)


def by_closure(module: Any, batch: Any, batch_idx: int) -> None:
    optimizer = module.optimizers()

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module.loss(batch)
        module.manual_backward(loss)
        return loss

    optimizer.step(closure=closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_by_hand_too(name: str) -> None:
    runs = [Manual(by_closure, OPTIMIZERS[name]), Manual(by_closure, OPTIMIZERS[name])]
    for module, host in zip(
        runs, ({"precision": "32-true"}, {"plugins": [MixedPrecisionPlan("32-true")]}), strict=True
    ):
        fit(module, **host)
    assert runs[0].losses == runs[1].losses
    assert same_weights(*map(weights, runs))
