"""Optimizers that evaluate their closure themselves: it runs when they ask for it, at the weights they have by then."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import LBFGS, SGD

from lightning_mp import MixedPrecisionPlan, PlanError
from support.manual import Manual
from support.models import Regression, same_weights, weights
from support.oracles import plan_for
from support.running import fit
from support.traces import Trace


class Stepped(SGD):
    """A step of a user's own, in the usual order."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


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


class Shrinks(SGD):
    """Decays the weights, then hands on what it was given."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        for group in self.param_groups:
            torch._foreach_mul_([one.data for one in group["params"]], 0.9)
        return super().step(*args, **kwargs)


class Perturbs(SGD):
    """Estimates a gradient along one direction by two evaluations, as SPSA and MeZO do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        members = [one for group in self.param_groups for one in group["params"]]
        directions, losses = [torch.sign(one.detach()) for one in members], []
        for by in (0.01, -0.02):
            for parameter, direction in zip(members, directions, strict=True):
                parameter.data.add_(direction, alpha=by)
            losses.append(closure().detach().item())
        for parameter, direction in zip(members, directions, strict=True):
            parameter.data.add_(direction, alpha=0.01 - 1e-3 * (losses[0] - losses[1]))
        return losses[0]


OPTIMIZERS: dict[str, Any] = {
    "in order": partial(Stepped, lr=1e-2, momentum=0.9),
    "ahead": partial(Extrapolates, lr=1e-2, momentum=0.9),
    "hands on": partial(Shrinks, lr=1e-2),
    "twice": partial(Perturbs, lr=1e-2),
    "LBFGS": partial(LBFGS, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_forward_sees_the_weights_it_sees_under_stock(name: str, mode: str) -> None:
    """To the bit, in each of the losses and in the weights."""
    runs = [Regression(OPTIMIZERS[name]), Regression(OPTIMIZERS[name])]
    options = {"accumulate_grad_batches": 2 if name == "ahead" else 1}
    for module, host in zip(runs, ({"precision": mode}, {"plugins": [MixedPrecisionPlan(mode)]}), strict=True):
        fit(module, **options, **host)
    assert runs[0].losses == runs[1].losses
    assert same_weights(*map(weights, runs))


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


@pytest.mark.parametrize("mode", ["32-true", "16-mixed"])
def test_a_step_that_has_to_be_skipped_is_broken_off_before_it_changes_anything(mode: str) -> None:
    module, trace, plan = Regression(OPTIMIZERS["in order"], overflow_at=(0, 3, 4)), Trace(), plan_for(mode)
    fit(module, plugins=[plan], callbacks=[trace])
    assert trace.skipped == [step in (0, 3, 4) for step in range(8)]
    assert (plan.applied_steps, plan.skipped_steps) == (5, 3)
    assert same_weights(trace.weights[2], trace.weights[4])
    assert torch.equal(trace.start["net.0.weight"], trace.weights[0]["net.0.weight"])


def test_a_step_of_lbfgs_is_skipped_at_its_first_evaluation() -> None:
    trace, plan = Trace(), plan_for("32-true")
    fit(Regression(OPTIMIZERS["LBFGS"], overflow_at=(1,)), plugins=[plan], callbacks=[trace])
    assert trace.skipped[:3] == [False, True, False]
    assert same_weights(trace.weights[0], trace.weights[1])


@pytest.mark.parametrize("name", ["ahead", "twice"])
def test_one_that_has_moved_weights_by_then_cannot_skip_and_says_so(name: str) -> None:
    with pytest.raises(PlanError, match=f"{OPTIMIZERS[name].func.__name__}, which moves weights before"):
        fit(Regression(OPTIMIZERS[name], overflow_at=(3,)), plugins=[plan_for("32-true")])
