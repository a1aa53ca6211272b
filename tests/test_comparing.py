"""The bounds of ``support.comparing``: the noise of another order of sums is within them, a planted fault is not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import AdamW

from support import hf
from support.comparing import eps, furthest, of_sums, of_training, same_runs
from support.models import weights
from support.oracles import plan_for
from support.running import fit

RATE, INFINITY = 1e-2, torch.tensor(float("inf"))


class TwoRanks(LightningModule):
    """A small Llama on what two ranks have, and what is wrong with it."""

    def __init__(self, fault: str, half: torch.dtype) -> None:
        super().__init__()
        self.model: Any = hf.llama()
        self.fault, self.losses = fault, list[float]()
        self.generator = torch.Generator().manual_seed(1)
        if fault == "a norm in half precision":
            norm = self.model.model.norm
            norm.forward = partial(_in_half, norm.forward, half)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        one, other = (hf.loss_of(self.model, (batch + rank) % hf.VOCABULARY) for rank in (0, 1))
        if self.fault == "one rank's gradients halved":
            other = other / 2 + other.detach() / 2
        self.losses.append((one + other).item() / 2)
        return (one + other) / 2

    def on_train_batch_end(self, *given: Any) -> None:
        """Where sums are ordered otherwise, weights are the next fp32 number up or down; here a third is each."""
        if self.fault == "another order of sums":
            for weight in self.parameters():
                way = torch.randint(3, weight.shape, generator=self.generator)
                moved = torch.where(way == 1, weight.data.nextafter(INFINITY), weight.data)
                weight.data.copy_(torch.where(way == 2, weight.data.nextafter(-INFINITY), moved))

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=RATE, eps=1e-4)


def _in_half(forward: Any, half: torch.dtype, x: Tensor) -> Tensor:
    return forward(x.to(half)).to(half).to(x.dtype)


def _trained(mode: str, fault: str = "none") -> dict[str, Any]:
    module = TwoRanks(fault, torch.float16 if mode == "16-mixed" else torch.bfloat16)
    fit(module, plugins=[plan_for(mode, pins={"*norm*": "fp32"})], data=hf.token_batches())
    return {"weights": weights(module), "losses": module.losses}


@pytest.fixture(scope="module", params=["32-true", "16-mixed", "bf16-mixed"])
def sound(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, _trained(request.param)


def test_another_order_of_sums_is_within(sound: tuple[str, dict[str, Any]]) -> None:
    mode, expected = sound
    found = _trained(mode, "another order of sums")
    assert furthest(found["weights"], expected["weights"]) > 0
    assert same_runs(found, expected, of_training(mode, RATE))


@pytest.mark.parametrize("fault", ["one rank's gradients halved", "a norm in half precision"])
def test_a_planted_fault_is_not(sound: tuple[str, dict[str, Any]], fault: str) -> None:
    mode, expected = sound
    found = _trained(mode, fault)
    assert not same_runs(found, expected, of_training(mode, RATE))
    if fault.startswith("one rank"):
        assert furthest(found["weights"], expected["weights"]) > 10 * of_training(mode, RATE)
    else:
        assert found["losses"][0] != expected["losses"][0]


def test_two_orders_of_a_sum_are_within_and_a_missing_summand_is_not() -> None:
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    backward = torch.tensor(0.0)
    for number in numbers.flip(0):
        backward += number
    assert abs(backward - numbers.sum()) <= of_sums(1000) * backward
    assert abs(backward - numbers[:-1].sum()) > of_sums(1000) * backward


def test_a_half_format_is_as_coarse_as_its_eps() -> None:
    assert (eps("16-true"), eps("bf16-mixed"), eps("32-true")) == (2.0**-10, 2.0**-7, 2.0**-23)
