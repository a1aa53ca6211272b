"""Which optimizers may be given pieces of parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from transformers.optimization import Adafactor as TransformersAdafactor

from lightning_mp.engines.elementwise import fault_on_flat_pieces
from support.optimizers import Around, Lamb, Lion

WHOLE: dict[str, Any] = {
    "Adafactor": optim.Adafactor,
    "transformers' Adafactor": TransformersAdafactor,
    "LAMB": partial(Lamb, lr=1e-2),
    "LAMB, warmed up": partial(Lamb, lr=0.0),
    "Muon": partial(optim.Muon, lr=1e-2),
}
BY_NUMBER: dict[str, Any] = {
    "AdamW": partial(optim.AdamW, fused=True),
    "an AdamW of the user's": partial(type("Mine", (optim.AdamW,), {}), lr=1e-3, weight_decay=0.3),
    "Lion": partial(Lion, lr=1e-3),
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9),
    "a wrapper, which cannot be tried": lambda parameters: Around(optim.AdamW(parameters)),
}


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 4))]


@pytest.mark.parametrize("name", WHOLE)
def test_steps_that_depend_on_the_whole_parameter_are_found(name: str) -> None:
    assert fault_on_flat_pieces(WHOLE[name](_parameters())) is not None


@pytest.mark.parametrize("name", BY_NUMBER)
def test_steps_on_each_number_by_itself_are_not_refused(name: str) -> None:
    parameters, state = _parameters(), torch.get_rng_state()
    assert fault_on_flat_pieces(BY_NUMBER[name](parameters)) is None
    assert torch.equal(torch.get_rng_state(), state)
    assert not parameters[0].any()
