"""The rule of the loss scale in a real run: it moves as declared, on the steps declared, and stops where told."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_mp import LossScaleError, LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError
from lightning_mp.numerics import loss_scale
from support.models import Regression
from support.oracles import SCALED
from support.running import fit
from support.traces import Trace

STEPS = 16  # two epochs

RULES = {
    "default": LossScaling(init_scale=64.0, growth_interval=3),
    "torch": LossScaling.torch(init_scale=64.0, growth_interval=3),
    "deepspeed": LossScaling.deepspeed(initial_scale_power=6, loss_scale_window=2, hysteresis=2, at_min="hold"),
    "deepspeed, consecutive": LossScaling.deepspeed(
        initial_scale_power=6, loss_scale_window=3, hysteresis=3, consecutive_hysteresis=True, at_min="hold"
    ),
    "megatron": LossScaling.megatron(initial_scale=64.0, growth_interval=2, hysteresis=2),
    "floor and ceiling": LossScaling(init_scale=32.0, growth_interval=1, min_scale=16.0, max_scale=128.0),
    "other factors": LossScaling(init_scale=64.0, growth_interval=6, growth_factor=4.0, backoff_factor=0.25),
    "static": LossScaling.static(64.0),
}
TRACES = [(), (0,), (3, 4, 5), (1, 3, 5, 7, 9), tuple(range(0, 16, 2)), tuple(range(4, 14))]


def _run(rule: LossScaling, bad: tuple[int, ...], mode: str = "16-mixed", **options: Any) -> Trace:
    trace = Trace()
    plan = MixedPrecisionPlan(mode, loss_scaling=rule, nonfinite=options.pop("nonfinite", "skip"))
    fit(Regression(overflow_at=bad), plugins=[plan], callbacks=[trace], max_epochs=2, **options)
    return trace


@pytest.mark.parametrize("bad", TRACES)
@pytest.mark.parametrize("rule", RULES)
def test_the_run_follows_the_pure_rule(rule: str, bad: tuple[int, ...]) -> None:
    """The trainer, the optimizer and the device tensors add nothing to ``numerics.loss_scale.adjust``."""
    state, expected = loss_scale.init(RULES[rule]), []
    for step in range(STEPS):
        state = loss_scale.adjust(RULES[rule], state, step in bad)
        expected.append(state.scale)
    trace = _run(RULES[rule], bad)
    assert trace.scales == expected
    assert trace.skipped == [step in bad for step in range(STEPS)]


@pytest.mark.parametrize(
    ("rule", "bad", "raises_at"),
    [
        # 4 -> 2 -> 1 at the second overflow; the third meets the floor
        (LossScaling(init_scale=4.0, at_min="raise"), (0, 1, 2), 2),
        (LossScaling(init_scale=4.0, at_min="raise"), (2, 5, 9), 9),
        (LossScaling(init_scale=4.0, at_min="raise"), (0, 1), None),
        (LossScaling(init_scale=1.0, at_min="raise"), (7,), 7),
        (LossScaling(init_scale=1.0, at_min="raise", hysteresis=2), (3, 7), 7),
        # growth in between puts it off: 2 -> 1, then up to 2 after two clean steps, 1 again, then the floor
        (LossScaling(init_scale=2.0, growth_interval=2, at_min="raise"), (0, 3, 4), 4),
        (LossScaling(init_scale=2.0, growth_interval=2, at_min="raise"), (0, 3, 6), None),
        (LossScaling(init_scale=8.0, backoff_factor=0.25, min_scale=2.0, at_min="raise"), (1, 2), 2),
        (LossScaling.deepspeed(initial_scale_power=1, hysteresis=1), (0, 5), 5),
    ],
)
@pytest.mark.parametrize("mode", SCALED)
def test_at_min_raise_raises_at_the_first_overflow_on_the_floor(
    mode: str, rule: LossScaling, bad: tuple[int, ...], raises_at: int | None
) -> None:
    if raises_at is None:
        assert len(_run(rule, bad, mode).scales) == STEPS
        return
    with pytest.raises(LossScaleError) as caught:
        _run(rule, bad, mode)
    assert caught.value.step == raises_at
    assert isinstance(caught.value, NonFiniteError)


def test_overflows_above_the_floor_do_not_count_against_the_budget() -> None:
    """With a loss scale an overflow is ordinary; only skips at the floor count (DESIGN section 2, small print)."""
    rule = LossScaling(init_scale=2.0**10, min_scale=1.0)
    bad = tuple(range(12))  # ten bring it to the floor, two more are skips there
    assert len(_run(rule, bad, nonfinite=NonFinite(max_consecutive=2)).scales) == STEPS
    with pytest.raises(NonFiniteError) as caught:
        _run(rule, tuple(range(13)), nonfinite=NonFinite(max_consecutive=2))
    assert caught.value.step == 12
