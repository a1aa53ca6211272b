"""Optimizers that evaluate their closure again within a step: they run as under stock Lightning, unchecked."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import LBFGS, SGD
from transformers.optimization import Adafactor as TransformersAdafactor

from conformance.optimizers import Lamb, Lion, Sam
from lightning_mp import MixedPrecisionPlan
from lightning_mp.errors import Faults
from lightning_mp.plan.optimizer_facts import check_shards, evaluates_again
from support.models import Regression
from support.optimizers import Around, Delegating
from support.traces import same_runs, traced


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
    plan, window = MixedPrecisionPlan(mode), 2 if name == "ahead" else 1
    hosts = {"precision": mode}, {"plugins": [plan]}
    stock, ours = (traced(Regression(OPTIMIZERS[name]), accumulate_grad_batches=window, **host) for host in hosts)
    assert same_runs(stock, ours)
    assert (plan.applied_steps, plan.skipped_steps, plan.step_skipped) == (ours.global_steps[-1], 0, False)


class Stepped(optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Prodigy(optim.SGD):
    """By its name, one whose rate is estimated over all parameters."""


MAKE: dict[str, Any] = {
    "AdamW": partial(optim.AdamW, fused=True),
    "Lion": partial(Lion, lr=1e-3),
    "Adafactor": optim.Adafactor,
    "transformers": partial(TransformersAdafactor, lr=None),
    "LAMB": partial(Lamb, lr=1e-2),
    "LAMB in a wrapper": lambda parameters: Around(Lamb(parameters, lr=1e-2)),
    "AdamW in a wrapper": lambda parameters: Around(optim.AdamW(parameters)),
    "no Optimizer": lambda parameters: Delegating(optim.AdamW(parameters)),
    "Muon": partial(optim.Muon, lr=1e-2),
    "8 bits": lambda parameters: pytest.importorskip("torchao.optim").AdamW8bit(parameters),
    "SAM": lambda parameters: Sam(optim.AdamW(parameters)),
    "Prodigy": Prodigy,
    "unknown": partial(Stepped, lr=0.1),
}
#: what is not refused is missing here
ANSWERS: dict[str, dict[Any, str]] = {
    "flat pieces": dict.fromkeys(
        ["Adafactor", "transformers", "LAMB", "LAMB in a wrapper", "Muon", "SAM", "Prodigy", "8 bits"], "needs whole"
    ),
    "a stage": dict.fromkeys(["LAMB", "LAMB in a wrapper", "SAM", "Prodigy"], "needs whole"),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("shards", ANSWERS)
def test_who_may_not_be_given_shards_is_known_by_name(shards: Any, name: str) -> None:
    faults, wanted = Faults(), ANSWERS[shards].get(name, "")
    check_shards(MAKE[name]([nn.Parameter(torch.ones(4, 4))]), shards, "here", faults)
    said = "".join(map(str, faults.found))
    assert wanted in said
    assert bool(wanted) == bool(said)


@pytest.mark.parametrize(
    ("build", "again"),
    [
        (partial(optim.LBFGS, lr=0.1), True),
        (OPTIMIZERS["ahead"], True),
        (lambda parameters: Sam(optim.AdamW(parameters)), True),
        (partial(Stepped, lr=0.1), False),
        (partial(optim.AdamW, lr=0.1), False),
    ],
)
def test_which_optimizers_evaluate_their_closure_again(build: Any, again: bool) -> None:
    optimizer = build([nn.Parameter(torch.ones(2))])
    assert evaluates_again(optimizer) == again
    if isinstance(optimizer, optim.Optimizer):
        optim.lr_scheduler.ConstantLR(optimizer)  # it wraps ``step`` on the instance
        assert evaluates_again(optimizer) == again
