"""The error a run stops with: what it says, and the rank, step, module and parameter that it carries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import LossScaleError, NonFiniteError
from lightning_mp.engines import diagnosis


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def _error(net: nn.Module, replay: Any, **changed: Any) -> NonFiniteError:
    known: dict[str, Any] = {"what": "a step", "step": 7, "loss": torch.ones(()), "scale": None, "at_min": False}
    return diagnosis.error(net, replay, **{**known, **changed}, distributed=False)


def _replay(net: nn.Module, factor: float = 1.0) -> Any:
    def run() -> Tensor:
        net.zero_grad()
        loss = net(torch.ones(2, 4)).sum() * factor
        loss.backward()
        return loss

    return run


def test_a_replay_names_the_module_and_the_parameter() -> None:
    net = _net()
    with torch.no_grad():
        net[2].weight[0, 0] = float("inf")
    error = _error(net, _replay(net))
    assert (error.rank, error.step, error.module, error.parameter) == (0, 7, "2", "2.weight")
    for part in ("in step 7 on rank 0: a step", "first seen in module '2' (forward)", "Allowed:", "pins={'2': 'fp32'}"):
        assert part in str(error)


def test_without_a_replay_the_gradients_at_hand_are_looked_at() -> None:
    net = _net()
    _replay(net)()
    net[0].bias.grad[0] = float("nan")
    error = _error(net, None)
    assert (error.module, error.parameter) == ("0", "0.bias")


@pytest.mark.parametrize(
    ("loss", "scale", "advice"),
    [
        (torch.tensor(float("nan")), None, "no loss scale makes a non-finite loss finite"),
        (torch.tensor(float("inf")), 2.0, "no loss scale makes a non-finite loss finite"),
        (torch.ones(()), 64.0, "use 'bf16-mixed'"),
        (torch.ones(()), None, "clip gradients"),
        (None, None, "clip gradients"),
    ],
)
def test_the_advice_fits_the_case(loss: Tensor | None, scale: float | None, advice: str) -> None:
    message = str(_error(_net(), None, loss=loss, scale=scale))
    assert advice in message
    assert ("loss scale 64" in message) == (scale == 64.0)
    assert ("non-finite already before it was scaled" in message) == (loss is not None and not loss.isfinite())


@pytest.mark.parametrize(("at_min", "kind"), [(False, NonFiniteError), (True, LossScaleError)])
def test_the_kind_of_error(at_min: bool, kind: type[Exception]) -> None:
    assert type(_error(_net(), None, at_min=at_min)) is kind
