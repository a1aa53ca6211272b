"""``NoOpScaler``: with checks a step is left out as under a loss scale, without them all is as in a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp.numerics.found_inf import FoundInf
from lightning_mp.numerics.no_op_scaler import NoOpScaler
from support.counting import HostReads

Make = Callable[..., torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def built(make: Make, *, checks: bool) -> tuple[nn.Linear, torch.optim.Optimizer, NoOpScaler]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, make(model.parameters()), NoOpScaler(FoundInf(), torch.device("cpu"), checks=checks)


def backward(model: nn.Module, optimizer: torch.optim.Optimizer, factor: float, scale: Any = lambda loss: loss) -> None:
    optimizer.zero_grad()
    scale(model(torch.ones(2, 4)).pow(2).mean() * factor).backward()


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("factors", [[1.0, 0.5], [1.0, math.inf, 0.5], [1.0, math.nan]])
def test_with_checks_it_is_a_plain_loop_without_the_bad_steps(name: str, factors: list[float]) -> None:
    (model, optimizer, scaler), (plain, other, _) = built(MAKES[name], checks=True), built(MAKES[name], checks=True)
    for factor in factors:
        scaler.multiply_back_([optimizer])
        backward(model, optimizer, factor, scaler.scale)
        scaler.look_(optimizer)
        scaler.step_checked(optimizer)
        scaler.update()
        assert scaler.flags.skipped is not math.isfinite(factor)
        if math.isfinite(factor):
            backward(plain, other, factor)
            other.step()
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=0)


@pytest.mark.parametrize("name", MAKES)
def test_without_checks_every_step_is_applied_and_nothing_is_read(name: str) -> None:
    (model, optimizer, scaler), (plain, other, _) = built(MAKES[name], checks=False), built(MAKES[name], checks=False)
    for factor in (1.0, math.inf):
        backward(model, optimizer, factor, scaler.scale)
        backward(plain, other, factor)
        with HostReads() as theirs:  # an optimizer may ask for its own step count
            other.step()
        with HostReads() as reads:
            assert scaler.found_inf(optimizer).dtype == torch.float32
            scaler.step_checked(optimizer)
        assert reads.count == theirs.count
        assert not scaler.flags.skipped
    torch.testing.assert_close(weights(model), weights(plain), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("again", [False, True])
def test_what_was_seen_before_the_next_backward_is_forgotten(again: bool) -> None:
    model, optimizer, scaler = built(MAKES["sgd"], checks=True)
    backward(model, optimizer, math.inf)
    scaler.look_(optimizer)
    if again:
        scaler.multiply_back_([optimizer])
        backward(model, optimizer, 1.0)
    assert scaler.found_inf(optimizer).item() == (not again)


def test_ranks_leave_the_same_step_out() -> None:
    model, optimizer, scaler = built(MAKES["sgd"], checks=True)
    scaler.flags.sync_with(lambda flag: flag.fill_(1) and None)  # another rank overflowed
    before = weights(model)
    backward(model, optimizer, 1.0)
    scaler.step_checked(optimizer)
    assert scaler.flags.skipped
    torch.testing.assert_close(weights(model), before, rtol=0, atol=0)
