"""What is asked of ``configure_optimizers``: an eps that vanishes, a schedule that counts skipped steps."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_mp import MixedPrecisionPlan
from support.doctor import Wrapped, found, net
from support.models import Regression


def _adam(**options: Any) -> Any:
    return partial(AdamW, lr=1e-3, **options)


# ------------------------------------------------------------------ eps


@pytest.mark.parametrize("plan", ["16-true", MixedPrecisionPlan("16-true")])
def test_adams_eps_is_0_in_fp16(plan: Any) -> None:
    finding = found(Wrapped(net(), _adam()), plan)["eps_underflows"]
    assert finding.severity == "error"
    assert finding.what.startswith("AdamW(eps=1e-08)")
    assert finding.where == "configure_optimizers"


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (_adam(eps=1e-4), "16-true"),
        (_adam(fused=True), "16-true"),
        (partial(SGD, lr=1e-3), "16-true"),
        (_adam(), "16-mixed"),
        (_adam(), "bf16-true"),
        (_adam(), {"precision": "16-true", "pins": {"Linear": "fp32"}}),
    ],
)
def test_where_eps_is_not_0_nothing_is_said(make: Any, plan: Any) -> None:
    assert "eps_underflows" not in found(Wrapped(net(), make), plan)


def test_an_optimizer_can_be_given_instead() -> None:
    model = net()
    assert "eps_underflows" not in found(model, "16-true")
    assert "eps_underflows" in found(model, "16-true", optimizer=AdamW(model.parameters()))


# ------------------------------------------------------------------ schedules

SCHEDULES = {
    "OneCycleLR": partial(OneCycleLR, max_lr=1e-2, total_steps=9),
    "LambdaLR": partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stock_scaler_skips_and_the_schedule_counts_it(name: str) -> None:
    finding = found(Regression(scheduler=SCHEDULES[name]), "16-mixed")["schedule_counts_skips"]
    assert finding.severity == "warning"
    assert finding.what.startswith(name)
    assert "MixedPrecisionPlan('16-mixed')" in finding.fix


@pytest.mark.parametrize("plan", ["bf16-mixed", "32-true", MixedPrecisionPlan("16-mixed")])
def test_a_plan_and_modes_without_a_scale_are_healthy(plan: Any) -> None:
    assert found(Regression(scheduler=SCHEDULES["LambdaLR"]), plan) == {}


class ByHand(Regression):
    """Manual optimization with a schedule that goes by steps, and once overflows."""

    def __init__(self, scheduler: Any) -> None:
        super().__init__(lambda p: SGD(p, lr=1.0), scheduler, overflow_at=(1,))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class Counting(ByHand):
    """It takes no notice of skips."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()


class Holding(ByHand):
    """As the doctor advises."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if not self.trainer.precision_plugin.step_skipped:
            self.lr_schedulers().step()


class ByEpoch(ByHand):
    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


@pytest.mark.parametrize("plan", ["16-mixed", MixedPrecisionPlan("16-mixed"), MixedPrecisionPlan("16-true")], ids=str)
@pytest.mark.parametrize(("kind", "counts"), [(Counting, True), (Holding, False), (ByEpoch, False)])
def test_under_manual_optimization_nobody_holds_it(plan: Any, kind: Any, counts: bool) -> None:
    """Whatever interval is written: Lightning reads none there."""
    for interval in ("step", "epoch"):
        module = kind(None)
        schedule = SCHEDULES["LambdaLR"]
        optimizer = SGD(module.parameters(), lr=1.0)
        given = {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": interval}}
        finding = found(module, plan, optimizer=given).get("schedule_counts_skips")
        assert (finding is not None) == (counts or (interval == "step" and kind is ByEpoch)), interval
        assert finding is None or "step_skipped" in finding.fix


def _dict(optimizer: Any, interval: str) -> dict[str, Any]:
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": SCHEDULES["LambdaLR"](optimizer), "interval": interval},
    }


def _every_shape(parameters: Any) -> dict[str, tuple[Any, bool]]:
    """What Lightning takes from ``configure_optimizers``, and whether a schedule in it goes by steps."""
    sgd = SGD(parameters, lr=1.0)
    plain = SCHEDULES["LambdaLR"](sgd)
    return {
        "an optimizer": (sgd, False),
        "a list": ([sgd], False),
        "two lists": (([sgd], [plain]), False),
        "two lists, a dict": (([sgd], [{"scheduler": plain, "interval": "step"}]), True),
        "a dict": (_dict(sgd, "step"), True),
        "a dict by epoch": (_dict(sgd, "epoch"), False),
        "a tuple of dicts": ((_dict(sgd, "epoch"), _dict(sgd, "step")), True),
        "nothing": (None, False),
    }


@pytest.mark.parametrize("shape", list(_every_shape(net().parameters())))
def test_whatever_lightning_takes_is_read(shape: str) -> None:
    model = Wrapped(net(), lambda p: _every_shape(p)[shape][0])
    counts = _every_shape(net().parameters())[shape][1]
    assert ("schedule_counts_skips" in found(model, "16-mixed")) == counts


class NeedsTrainer(Regression):
    """As many do."""

    def configure_optimizers(self) -> Any:
        total = self.trainer.estimated_stepping_batches
        return SGD(self.parameters(), lr=1 / total)


def test_what_needs_a_trainer_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_mp.monitor.doctor"):
        assert found(NeedsTrainer(), "16-mixed") == {}
    assert "schedule_counts_skips could not be made" in caplog.text


class Careless(Regression):
    """Changes itself when it is asked."""

    def configure_optimizers(self) -> Any:
        self.net[0].weight.requires_grad_(False)
        self.asked = True
        self.losses.append(torch.rand(1).item())
        return _dict(SGD((p for p in self.parameters() if p.requires_grad), lr=1.0), "step")


def test_what_asking_changes_is_undone() -> None:
    module = Careless()
    generator = torch.get_rng_state()
    assert "schedule_counts_skips" in found(module, "16-mixed")
    assert module.net[0].weight.requires_grad
    assert module.losses == []
    assert not hasattr(module, "asked")
    assert torch.equal(generator, torch.get_rng_state())


# ------------------------------------------------------------------ updates


class Rounds(AdamW):
    bf16_stochastic_round = True


@pytest.mark.parametrize("plan", ["bf16-true", MixedPrecisionPlan("bf16-true"), "16-true"])
def test_a_rate_below_half_of_the_last_bit(plan: Any) -> None:
    """Of weights evenly spread over +-1/16 those from 1/64 on stay: half of their last bit is more."""
    bits = 12 if plan == "16-true" else 9
    model = nn.Linear(128, 128, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1 / 16, 1 / 16, 2**14).view(128, 128))
    rate = 1.5 * 2.0 ** (-4 - 2 - bits)
    finding = found(model, plan, optimizer=AdamW(model.parameters(), lr=rate, eps=1e-4))["updates_vanish"]
    assert finding.severity == "warning"
    assert " 75% of the weights" in finding.what
    assert "updates_vanish" not in found(model, plan, optimizer=AdamW(model.parameters(), lr=8 * rate, eps=1e-4))


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (partial(Rounds, lr=1e-6), "bf16-true"),
        (partial(AdamW, lr=1e-6), "bf16-mixed"),
        (partial(AdamW, lr=1e-6), {"precision": "bf16-true", "pins": {"Linear": "fp32"}}),
        (partial(AdamW, lr=1e-6), "32-true"),
    ],
)
def test_where_updates_are_kept_nothing_is_said(make: Any, plan: Any) -> None:
    assert "updates_vanish" not in found(Wrapped(net(), make), plan)


def test_deepspeeds_own_engine_keeps_fp32_masters() -> None:
    make = partial(AdamW, lr=1e-6)
    assert "updates_vanish" in found(Wrapped(net(), make), "bf16-true")
    assert "updates_vanish" not in found(Wrapped(net(), make), "bf16-true", "deepspeed_stage_2")


def test_a_warm_up_does_not_count() -> None:
    def make(parameters: Any) -> Any:
        optimizer = AdamW(parameters, lr=1e-2)
        return [optimizer], [LambdaLR(optimizer, lambda step: 1e-4 * (step + 1))]

    assert "updates_vanish" not in found(Wrapped(net(), make), "bf16-true")
