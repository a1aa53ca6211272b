"""What can be written for an action, and what a lowered learning rate does and leaves."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback

from lightning_mp.errors import Faults
from lightning_mp.health import actions
from lightning_mp.health.actions import ReduceLR
from support.models import Regression
from support.running import fit


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


class Lowers(Callback):
    """Starts ``reduction`` after the steps ``at``; notes what schedulers and users see."""

    def __init__(self, reduction: ReduceLR, at: tuple[int, ...]) -> None:
        self.reduction, self.at = reduction, at
        self.seen: list[float] = []
        self.used: list[float] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0]
        self.moved = [parameter.detach().clone() for parameter in pl_module.parameters()]
        optimizer.register_step_post_hook(lambda *_: self._note(pl_module))

    def _note(self, module: Any) -> None:
        """With plain SGD and gradients of 1, a step is as long as the learning rate."""
        now = [parameter.detach().clone() for parameter in module.parameters()]
        self.used.append(round(float((self.moved[0] - now[0]).mean()), 6))
        self.moved = now

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad = torch.ones_like(parameter)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.reduction.after_batch(trainer)
        if trainer.global_step - 1 in self.at:
            self.reduction.start(trainer)


def lowered(at: tuple[int, ...], schedule: Any = None, **options: Any) -> Lowers:
    watch = Lowers(ReduceLR(), at)
    fit(Regression(partial(torch.optim.SGD, lr=1.0), schedule), callbacks=[watch], **options)
    return watch


def test_the_next_steps_are_smaller_and_then_no_more() -> None:
    assert lowered(at=(1,)).used == [1, 1, 0.1, 0.1, 1, 1, 1, 1]


def test_started_again_it_begins_anew_and_multiplies_once() -> None:
    assert lowered(at=(0, 1)).used == [1, 0.1, 0.1, 0.1, 1, 1, 1, 1]


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
