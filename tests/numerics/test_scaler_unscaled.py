"""Gradients kept unscaled between backward passes, for users who clip and step by hand; steps without a read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mp import LossScaling
from lightning_mp.numerics import grads
from lightning_mp.numerics.loss_scale import LossScaler
from support.counting import HostReads
from support.loops import FUSED, INF, OPTIMIZERS, backward, net, train
from support.models import same_weights, weights

CONFIG = LossScaling(init_scale=2.0**10, growth_interval=1)


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def pass_waiting(model: nn.Module, scaler: LossScaler, optimizers: list[Optimizer], step: int, overflow: bool) -> None:
    scaler.multiply_back_(optimizers)
    backward(model, scaler, step, overflow)
    scaler.divide_(optimizers)


# ---------------------------------------------------------------------- unscaled gradients


def test_accumulation_waiting_is_exactly_the_accumulation_of_scaled_gradients() -> None:
    scaled, model = net(), net()
    under, true = LossScaler(CONFIG), LossScaler(CONFIG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        backward(scaled, under, step, overflow=False)
        pass_waiting(model, true, [optimizer], step, overflow=False)
    under.unscale_(torch.optim.SGD(scaled.parameters(), lr=0.1))
    assert all(map(torch.equal, gradients_of(model), gradients_of(scaled)))


def test_gradients_waiting_while_the_scale_moves_keep_their_true_value() -> None:
    """One optimizer accumulates while the steps of another move the scale."""
    waiting, stepping, scaler = net(), net(), LossScaler(CONFIG)
    waiter = torch.optim.SGD(waiting.parameters(), lr=0.1)
    stepper = torch.optim.SGD(stepping.parameters(), lr=0.1)
    both: list[Optimizer] = [waiter, stepper]
    pass_waiting(waiting, scaler, both, 0, overflow=False)
    pass_waiting(stepping, scaler, both, 0, overflow=False)
    scaler.step(stepper)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    pass_waiting(waiting, scaler, both, 1, overflow=False)
    plain, one = net(), LossScaler(LossScaling.static(1))
    backward(plain, one, 0, overflow=False)
    backward(plain, one, 1, overflow=False)
    assert all(map(torch.equal, gradients_of(waiting), gradients_of(plain)))


def test_a_parameter_of_two_optimizers_is_divided_once() -> None:
    model, plain, scaler = net(), net(), LossScaler(CONFIG)
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    last_layer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    backward(plain, LossScaler(LossScaling.static(1)), 0, overflow=False)
    backward(plain, LossScaler(LossScaling.static(1)), 1, overflow=False)
    for step in range(2):
        pass_waiting(model, scaler, [everything, last_layer], step, overflow=False)
    assert all(map(torch.equal, gradients_of(model), gradients_of(plain)))


@pytest.mark.parametrize("first_overflows", [True, False])
@pytest.mark.parametrize("second_overflows", [True, False])
def test_the_update_counts_an_overflow_before_anothers_backward_pass(
    first_overflows: bool, second_overflows: bool
) -> None:
    """As in a GAN: one network's backward pass and step, then the other's, then the update."""
    first, second, scaler = net(), net(), LossScaler(CONFIG)
    optimizers: list[Optimizer] = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second)]
    for model, optimizer, overflow in zip(
        (first, second), optimizers, (first_overflows, second_overflows), strict=True
    ):
        optimizer.zero_grad()
        pass_waiting(model, scaler, optimizers, 0, overflow)
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (2.0**9 if first_overflows or second_overflows else 2.0**11)


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


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("clip", [None, "norm", "value"])
@pytest.mark.parametrize("scaling", [LossScaling(), LossScaling.deepspeed(at_min="hold")], ids=["torch", "deepspeed"])
def test_a_fused_step_with_clipping_reads_nothing(name: str, clip: str | None, scaling: LossScaling) -> None:
    model, scaler = net(), LossScaler(scaling)
    optimizer = FUSED[name](model.parameters())
    train(model, optimizer, scaler, [False])  # the state is made here
    losses = [model(torch.full((3, 4), float(step))).pow(2).mean() * scale for step, scale in enumerate((1, INF, 1))]
    with HostReads() as reads:
        for loss in losses:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if clip == "norm":
                grads.clip_grad_norm_(model.parameters(), 0.5)
            elif clip == "value":
                torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
    assert reads.count == 0
