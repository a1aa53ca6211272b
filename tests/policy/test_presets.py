"""Policies by name."""

from __future__ import annotations

import pytest

from lightning_mp import LossScaling, MixedPrecisionPlan, Pin, PlanError
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.presets import preset

EXPECTED = {
    "fp32": ("32-true", None),
    "tf32": ("32-true", "high"),
    "bf16": ("bf16-mixed", None),
    "fp16": ("16-mixed", None),
    "bf16_true": ("bf16-true", None),
    "fp16_true": ("16-true", None),
    "v100": ("16-mixed", None),
    "t4": ("16-mixed", None),
    "a100": ("bf16-mixed", "high"),
    "h100": ("bf16-mixed", "high"),
    "b200": ("bf16-mixed", "high"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_preset_is_a_policy(name: str) -> None:
    precision, tf32 = EXPECTED[name]
    assert preset(name) == PrecisionPolicy(precision=precision, tf32=tf32)
    assert MixedPrecisionPlan.preset(name).policy == preset(name)


def test_longspec_is_fp16_with_deepspeeds_loss_scale_fp32_norms_and_tf32() -> None:
    assert preset("longspec") == PrecisionPolicy(
        precision="16-mixed",
        loss_scaling=LossScaling.deepspeed(initial_scale_power=16, loss_scale_window=1000, hysteresis=2),
        pins=(Pin("*norm*", "fp32"),),
        tf32="high",
    )


@pytest.mark.parametrize(
    ("name", "fix"), [("a1000", "did you mean 'a100'"), ("", "choose one of these"), ("zzz", "choose one of these")]
)
def test_an_unknown_preset_is_refused_with_the_list(name: str, fix: str) -> None:
    with pytest.raises(PlanError) as error:
        preset(name)
    (fault,) = error.value.faults
    assert all(known in fault.allowed for known in EXPECTED)
    assert fault.fix.startswith(fix)
