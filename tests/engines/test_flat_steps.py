"""Which optimizers step pieces of a flat tensor as they step the tensor: found by letting a copy step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from conformance.optimizers import Delegating, Lamb, Lion, Sam
from lightning_mp.engines import flat_steps

Make = Callable[[Any], Optimizer]
FLAT: dict[str, Make] = {
    "AdamW": AdamW,
    "fused": partial(AdamW, fused=True),
    "foreach, amsgrad": partial(Adam, foreach=True, amsgrad=True),
    "momentum": partial(SGD, lr=0.1, momentum=0.9),
    "RMSprop": RMSprop,
    "Adagrad": Adagrad,
    "NAdam": NAdam,
    "Lion": partial(Lion, lr=0.1),
}
WHOLE: dict[str, tuple[Make, str]] = {
    "Adafactor": (Adafactor, "depends on the other numbers"),
    "LAMB": (partial(Lamb, lr=0.1), "depends on the other numbers"),
    "Muon": (partial(Muon, lr=0.1), "takes no flat tensors"),
}
UNKNOWN: dict[str, Make] = {
    "a wrapper": lambda parameters: Delegating(AdamW(parameters)),
    "SAM": lambda parameters: Sam(AdamW(parameters)),
}


def _asked(make: Make) -> tuple[bool, str | None]:
    """The answers about an optimizer that a scheduler has taken; it is left as it was."""
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = make([parameter])
    LambdaLR(optimizer, lambda step: 1.0)
    generator, kept = torch.get_rng_state(), {key: dict(value) for key, value in optimizer.state.items()}
    answer = flat_steps.steps_alone(optimizer), flat_steps.why_not(optimizer)
    assert torch.equal(parameter, torch.ones(4, 4))
    assert parameter.grad is None
    assert kept == {key: dict(value) for key, value in optimizer.state.items()}
    assert torch.equal(generator, torch.get_rng_state())
    return answer


@pytest.mark.parametrize("name", FLAT)
def test_an_flat_steps_optimizer_may_step_pieces(name: str) -> None:
    assert _asked(FLAT[name]) == (True, None)


@pytest.mark.parametrize("name", WHOLE)
def test_one_that_looks_at_a_whole_tensor_may_not(name: str) -> None:
    make, said = WHOLE[name]
    alone, reason = _asked(make)
    assert alone
    assert said in str(reason)


@pytest.mark.parametrize("name", UNKNOWN)
def test_one_whose_copy_steps_nothing_of_its_own_is_not_known(name: str) -> None:
    assert _asked(UNKNOWN[name]) == (False, None)
