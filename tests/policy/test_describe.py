"""A policy's ``repr`` builds it again, and the table says what it declares."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings

from lightning_mp import FP8, Checkpointing, LossScaling, MixedPrecisionPlan, NonFinite, Pin, PrecisionPolicy
from lightning_mp.modules import describe
from support.policies import policies

NAMES = {kind.__name__: kind for kind in (FP8, Checkpointing, LossScaling, NonFinite, Pin, PrecisionPolicy)}
NAMES["MixedPrecisionPlan"] = MixedPrecisionPlan


@settings(max_examples=60)
@given(policy=policies())
def test_what_is_printed_builds_it_again(policy: PrecisionPolicy) -> None:
    assert eval(repr(policy), NAMES) == policy
    assert eval(repr(MixedPrecisionPlan.from_policy(policy)), NAMES).policy == policy


STATIC = LossScaling.static(128)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (LossScaling(), "65536 at first, x2 after 2000 clean steps, x0.5 after an overflow; at least 1, held there"),
        (LossScaling.torch(), "65536 at first, x2 after 2000 clean steps, x0.5 after an overflow"),
        (
            LossScaling.deepspeed(consecutive_hysteresis=True, initial_scale_power=4, min_loss_scale=2),
            "16 at first, x2 after 1000 clean steps, x0.5 after 2 overflows in a row; at least 2, an",
        ),
        (LossScaling(max_scale=2.0**20, min_scale=0, growth_interval=1, hysteresis=3), "at most 1.04858e+06"),
        (LossScaling(init_scale=3000.0, max_scale=inf), "3000 at first, "),
        (STATIC, "128, fixed; a step that overflows is skipped"),
    ],
)
def test_the_rule_of_the_loss_scale_in_words(rule: LossScaling, said: str) -> None:
    assert said in describe.loss_scaling(PrecisionPolicy(precision="16-mixed", loss_scaling=rule))
