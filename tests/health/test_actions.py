"""What can be written for an action, and what a lowered learning rate does and leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_mp.errors import Faults
from lightning_mp.health import actions
from lightning_mp.health.actions import ReduceLR


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"grad_norm_spikes": "log"}, "grad_norm_spike"),
        ({"loss_divergence": "stopp"}, "'stop'"),
        ({"loss_divergence": 3}, "'reduce_lr'"),
        ({"throughput_drop": "skip"}, "grad_norm_spike"),
    ],
)
def test_what_is_wrong_is_told_with_what_is_allowed(given: Any, named: str) -> None:
    faults = Faults()
    actions.parse(given, faults)
    (fault,) = faults.found
    assert named in str(fault)


@pytest.fixture(autouse=True)
def _two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actions, "STEPS", 2)


def test_a_step_that_fails_leaves_the_rate_as_it_was() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    trainer = cast("Any", SimpleNamespace(global_step=0, optimizers=[optimizer]))
    reduction = ReduceLR()
    reduction.start(trainer)

    def fails() -> Any:
        assert optimizer.param_groups[0]["lr"] == 0.1
        raise KeyError("planned")

    with pytest.raises(KeyError, match="planned"):
        optimizer.step(fails)
    reduction.release()
    assert optimizer.param_groups[0]["lr"] == 1.0
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1.0


def test_it_reaches_through_what_deepspeed_puts_around_an_optimizer() -> None:
    inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    outer = SimpleNamespace(optimizer=SimpleNamespace(optimizer=inner))
    reduction = ReduceLR()
    reduction.start(cast("Any", SimpleNamespace(global_step=0, optimizers=[outer])))
    seen: list[float] = []
    inner.register_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    inner.step()
    assert seen == [0.1]
