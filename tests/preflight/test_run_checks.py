"""What the doctor says of a run: the loss scale, the optimizer, the schedule, DeepSpeed's JSON."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_mp import LossScaling, MixedPrecisionPlan, make_strategy
from lightning_mp.policy.pieces import FP32_MAX
from lightning_mp.preflight.doctor import doctor
from lightning_mp.record.findings import Finding
from support.doctor import CPU, Wrapped, found, net
from support.models import Regression

# ---------------------------------------------------------------------- the loss scale, accumulation, epsilon


def _plan(mode: str = "16-mixed", **scaling: Any) -> MixedPrecisionPlan:
    return MixedPrecisionPlan(mode, loss_scaling=LossScaling(**scaling))


STATIC = {"dynamic": False, "min_scale": 0.0}
#: the finding, the plan, the micro-batches, the severity, what stands in the text
SAID: list[tuple[str, Any, int, str, str]] = [
    *(("scale_overflows_at_once", _plan(mode, **scaling), 1, severity, said)
      for mode in ("16-mixed", "16-true")
      for scaling, severity, said in (
        ({"init_scale": 2.0**32}, "warning", "about 16 steps are skipped"),
        ({"init_scale": 2.0**32, "hysteresis": 2}, "warning", "about 17 steps are skipped"),
        ({"init_scale": 2.0**25}, "warning", "about 9 steps are skipped"),
        ({"init_scale": 2.0**32, **STATIC}, "warning", "skipped forever"),
        ({"init_scale": 2.0**41, **STATIC}, "error", "skipped forever"),
        ({"init_scale": 2.0**42, "min_scale": 2.0**41}, "error", "skipped forever"))),
    ("accumulation_overflows", _plan("16-true"), 8, "warning", "1 or more"),
    ("accumulation_overflows", _plan("16-true", init_scale=2.0**20), 4, "warning", "0.0625 or more"),
    ("accumulation_overflows", _plan(init_scale=FP32_MAX), 2, "warning", "1 or more"),
    ("eps_underflows", "16-true", 1, "error", "AdamW(eps=1e-08)"),
    ("eps_underflows", MixedPrecisionPlan("16-true"), 1, "error", "AdamW(eps=1e-08)"),
]  # fmt: skip
WHERE = {
    "scale_overflows_at_once": "loss_scaling.init_scale",
    "accumulation_overflows": "accumulate_grad_batches",
    "eps_underflows": "configure_optimizers",
}


def _adam(**options: Any) -> Any:
    return partial(AdamW, lr=1e-3, **options)


@pytest.mark.parametrize(("name", "plan", "parts", "severity", "said"), SAID)
def test_what_is_said(name: str, plan: Any, parts: int, severity: str, said: str) -> None:
    finding = found(Wrapped(net(), _adam()), plan, None, {"accumulate_grad_batches": parts})[name]
    assert (finding.severity, finding.where) == (severity, WHERE[name])
    assert said in str(finding)


@pytest.mark.parametrize("scaling", [{}, {"init_scale": 2.0**24}, {"init_scale": 2.0**15, "dynamic": False}])
def test_usual_scales_are_healthy(scaling: Any) -> None:
    assert found(net(), _plan(**scaling)) == {}
    assert found(net(), "16-mixed") == {}


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
    with caplog.at_level(logging.INFO, "lightning_mp.preflight.fit_checks"):
        assert found(NeedsTrainer(), "16-mixed") == {}
    assert "schedule_counts_skips could not be made" in caplog.text


pytest.importorskip("deepspeed")


def _found(plan: Any, strategy: Any, trainer: Any = None) -> list[Finding]:
    findings = doctor(net(), plan, strategy, trainer, device=CPU)
    return [finding for finding in findings if finding.name == "deepspeed_contradicts_trainer"]


def _ours(config: Any, plan: MixedPrecisionPlan | None = None) -> Any:
    return make_strategy("deepspeed_zero2", plan or MixedPrecisionPlan("bf16-mixed"), config=config)


@pytest.mark.parametrize(
    ("config", "trainer", "both"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 2}, ("steps=4", "accumulate_grad_batches=2")),
        ({"gradient_accumulation_steps": 4}, {"devices": 2}, ("steps=4", "accumulate_grad_batches=1")),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, ("clipping=1.0", "gradient_clip_val=0.5")),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
            {"devices": 8, "accumulate_grad_batches": 4},
            ("train_batch_size=64", "= 128"),
        ),
    ],
)
def test_json_and_trainer_disagree(config: Any, trainer: Any, both: tuple[str, str]) -> None:
    (finding,) = _found(MixedPrecisionPlan("bf16-mixed"), _ours(config), trainer)
    assert finding.severity == "error"
    assert all(value in finding.what for value in both)
    assert finding.where == next(iter(config))


def test_json_and_plan_disagree() -> None:
    findings = _found(MixedPrecisionPlan("bf16-mixed"), {"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    assert [finding.where for finding in findings] == ["fp16.enabled"]
    assert "precision='bf16-mixed'" in findings[0].what


@pytest.mark.parametrize(
    ("config", "trainer"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 4}),
        ({"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}, {"accumulate_grad_batches": 4}),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 1.0}),
        ({"gradient_clipping": 1.0}, {"accumulate_grad_batches": 2}),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, {"accumulate_grad_batches": 4}),
        ({"gradient_accumulation_steps": 4}, None),
        ({}, {"accumulate_grad_batches": 4}),
    ],
)
def test_what_agrees_or_cannot_be_known_is_healthy(config: Any, trainer: Any) -> None:
    assert _found(MixedPrecisionPlan("bf16-mixed"), _ours(config), trainer) == []


@pytest.mark.parametrize("strategy", [None, "auto", "ddp", "mp_deepspeed_zero2", DeepSpeedStrategy(stage=2)])
def test_without_a_json_there_is_nothing_to_contradict(strategy: Any) -> None:
    assert _found("bf16-mixed", strategy, {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}) == []


HALF = {"fp16": {"enabled": True}}


@pytest.mark.parametrize("plan", [MixedPrecisionPlan("bf16-mixed"), "bf16-mixed", "32-true"], ids=str)
@pytest.mark.parametrize("key", [None, "plugins", "precision"])
def test_another_precision_in_the_json_of_lightnings_own_strategy(plan: Any, key: str | None) -> None:
    """It refuses a plan; of its own precisions it sets the block beside the other one, or leaves that alone."""
    if (key == "plugins") == isinstance(plan, str) and key is not None:
        return
    findings = _found(plan if key is None else None, DeepSpeedStrategy(config=HALF), key and {key: plan})
    assert [(finding.severity, finding.where) for finding in findings] == [("error", "fp16.enabled")]
    assert f"precision={getattr(plan, 'precision', plan)!r}" in findings[0].what
