"""Gradients kept unscaled between backward passes, for users who clip and step by hand; steps without a read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mp import LossScaling
from lightning_mp.numerics.loss_scale import LossScaler
from support.loops import OPTIMIZERS, backward, net, train
from support.models import same_weights, weights

CONFIG = LossScaling(init_scale=2.0**10, growth_interval=1)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def pass_waiting(model: nn.Module, scaler: LossScaler, optimizers: list[Optimizer], step: int, overflow: bool) -> None:
    scaler.multiply_back_(optimizers)
    backward(model, scaler, step, overflow)
    scaler.divide_(optimizers)


# ---------------------------------------------------------------------- unscaled gradients


def test_a_parameter_of_two_optimizers_is_divided_once() -> None:
    model, plain, scaler = net(), net(), LossScaler(CONFIG)
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    last_layer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    backward(plain, LossScaler(LossScaling.static(1)), 0, overflow=False)
    backward(plain, LossScaler(LossScaling.static(1)), 1, overflow=False)
    for step in range(2):
        pass_waiting(model, scaler, [everything, last_layer], step, overflow=False)
    assert all(map(torch.equal, gradients_of(model), gradients_of(plain)))


# ---------------------------------------------------------------------- a skipped step changes nothing


def same_everything(one: tuple[nn.Module, Optimizer], other: tuple[nn.Module, Optimizer]) -> bool:
    states = [optimizer.state_dict()["state"] for _, optimizer in (one, other)]
    flat = [
        {(key, name): torch.as_tensor(value) for key, own in s.items() for name, value in own.items()} for s in states
    ]
    return same_weights(weights(one[0]), weights(other[0])) and same_weights(*flat)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("skipped", [[0], [0, 1], [2], [0, 2]], ids=lambda steps: f"skipped {steps}")
def test_a_run_with_skipped_steps_is_the_run_without_them(name: str, skipped: list[int]) -> None:
    """The first step is one that counts: there optimizers make their state, in memory that may hold anything."""
    scaling = LossScaling(init_scale=2.0**10, growth_interval=1000, backoff_factor=0.5)
    held, never = net(), net()
    optimizer, other = OPTIMIZERS[name](held.parameters()), OPTIMIZERS[name](never.parameters())
    scaler, plain = LossScaler(scaling), LossScaler(scaling)
    with_garbage_in_new_memory(lambda: train(held, optimizer, scaler, [step in skipped for step in range(5)]))
    for step in range(5):
        if step not in skipped:
            train(never, other, plain, [False], start=step)
    assert same_everything((held, optimizer), (never, other))


def with_garbage_in_new_memory(run: Callable[[], Any]) -> None:
    """Uninitialised memory holds NaN, as it may at any time: torch's own switch for finding uses of it."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory
        run()
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------- host reads
