"""Which optimizers may be given pieces of parameters, found by letting copies step; which step without a closure."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LambdaLR
from transformers.optimization import Adafactor as TransformersAdafactor

from conformance.optimizers import Lamb, Lion, Sam
from lightning_mp.engines.elementwise import fault_on_flat_pieces, steps_alone
from support.optimizers import Around, Delegating


class Configured(optim.AdamW):
    """What its step needs is not in its groups."""

    def __init__(self, parameters: Any, ceiling: float) -> None:
        super().__init__(parameters)
        self.ceiling = ceiling

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            torch.nn.utils.clip_grad_value_(group["params"], self.ceiling)
        return super().step(closure)


WHOLE: dict[str, Any] = {
    "Adafactor": optim.Adafactor,
    "transformers' Adafactor": TransformersAdafactor,
    "LAMB": partial(Lamb, lr=1e-2),
    "LAMB, warmed up": partial(Lamb, lr=0.0),
    "LAMB in a wrapper": lambda parameters: Around(Lamb(parameters, lr=1e-2)),
    "Muon": partial(optim.Muon, lr=1e-2),
    "torchao's, of 8 bits": lambda parameters: pytest.importorskip("torchao.optim").AdamW8bit(parameters),
    "SAM": lambda parameters: Sam(optim.AdamW(parameters)),
}
BY_NUMBER: dict[str, Any] = {
    "AdamW": partial(optim.AdamW, fused=True),
    "an AdamW of the user's": partial(type("Mine", (optim.AdamW,), {}), lr=1e-3, weight_decay=0.3),
    "foreach, amsgrad": partial(type("Mine", (optim.Adam,), {}), foreach=True, amsgrad=True),
    "with attributes of its own": partial(Configured, ceiling=0.5),
    "Lion": partial(Lion, lr=1e-3),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9),
    "a wrapper": lambda parameters: Around(optim.AdamW(parameters)),
    "one that is no Optimizer": lambda parameters: Delegating(optim.AdamW(parameters)),
}
#: of all of them, those that hold another optimizer or want a closure
NOT_ALONE = {"SAM", "a wrapper", "LAMB in a wrapper", "one that is no Optimizer"}


def _asked(make: Any) -> tuple[str | None, bool]:
    """The answers about an optimizer that a scheduler has taken; it is left as it was."""
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = make([parameter])
    if isinstance(optimizer, optim.Optimizer) and optimizer.param_groups[0]["lr"] is not None:
        LambdaLR(optimizer, lambda step: 1.0)
    generator, kept = torch.get_rng_state(), {key: dict(value) for key, value in optimizer.state.items()}
    answer = fault_on_flat_pieces(optimizer), steps_alone(optimizer)
    assert torch.equal(parameter, torch.ones(4, 4))
    assert parameter.grad is None
    assert kept == {key: dict(value) for key, value in optimizer.state.items()}
    assert torch.equal(generator, torch.get_rng_state())
    return answer


@pytest.mark.parametrize("name", WHOLE)
def test_steps_that_depend_on_the_whole_parameter_are_found(name: str) -> None:
    why, alone = _asked(WHOLE[name])
    assert why is not None
    assert alone == (name not in NOT_ALONE)


@pytest.mark.parametrize("name", BY_NUMBER)
def test_steps_on_each_number_by_itself_are_not_refused(name: str) -> None:
    assert _asked(BY_NUMBER[name]) == (None, name not in NOT_ALONE)
