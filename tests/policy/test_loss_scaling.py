"""The fields of ``LossScaling`` and their ranges; what the rule makes of them is in numerics/test_loss_scale.py."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import pytest

from lightning_mp import LossScaling, PlanError

NAN, INF = float("nan"), float("inf")
FRACTION, WHOLE = "a number between 0 and 1, both left out", "a whole number >= "

BAD: list[tuple[dict[str, Any], str, str]] = [
    *[
        ({"init_scale": value}, f"init_scale={value!r}", "a finite number > 0")
        for value in (0, -1, NAN, INF, "8", None)
    ],
    ({"init_scale": True}, "init_scale=True", "a finite number > 0"),
    ({"init_scale": 1e39}, "init_scale=1e+39", "fp32"),
    ({"init_scale": 1e-50, "min_scale": 0}, "init_scale=1e-50", "fp32"),
    *[
        ({"growth_factor": value}, f"growth_factor={value!r}", "a finite number > 1")
        for value in (1, 0.5, 0, -2, NAN, INF)
    ],
    *[({"backoff_factor": value}, f"backoff_factor={value!r}", FRACTION) for value in (1, 2, 0, -0.5, NAN)],
    *[({"growth_interval": value}, f"growth_interval={value!r}", f"{WHOLE}1") for value in (0, -1, 2.0, "3", True)],
    *[({"growth_delay": value}, f"growth_delay={value!r}", f"{WHOLE}0") for value in (-1, 0.5)],
    *[({"hysteresis": value}, f"hysteresis={value!r}", f"{WHOLE}1") for value in (0, -1, 1.5, None)],
    *[({"min_scale": value}, f"min_scale={value!r}", "a finite number >= 0") for value in (-1, NAN, INF, "1")],
    *[({"max_scale": value}, f"max_scale={value!r}", "None or a number > 0") for value in (0, -1, NAN, "1", True)],
    ({"at_min": "stop"}, "at_min='stop'", "'hold', 'raise'"),
    ({"dynamic": "false"}, "dynamic='false'", "True, False"),
    ({"consecutive_hysteresis": "no"}, "consecutive_hysteresis='no'", "True, False"),
    ({"min_scale": 8, "max_scale": 4}, "min_scale=8 above max_scale=4", ""),
    ({"init_scale": 0.5}, "init_scale=0.5 with min_scale=1.0, max_scale=None", ""),
    ({"max_scale": 1024}, "init_scale=65536.0 with min_scale=1.0, max_scale=1024", ""),
]


@pytest.mark.parametrize(("written", "given", "allowed"), BAD, ids=[row[1] for row in BAD])
def test_a_value_out_of_its_range_is_refused(written: dict[str, Any], given: str, allowed: str) -> None:
    with pytest.raises(PlanError) as error:
        LossScaling(**written)
    (fault,) = error.value.faults
    assert fault.problem == given
    assert allowed in fault.allowed
    assert fault.fix


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(PlanError) as error:
        LossScaling(
            init_scale=-1,
            growth_factor=1,
            backoff_factor=1,
            growth_interval=0,
            growth_delay=-1,
            hysteresis=0,
            min_scale=-1,
            max_scale=0,
            at_min="stop",  # type: ignore[arg-type]
        )
    said = {fault.problem.split("=")[0] for fault in error.value.faults}
    assert said == {item.name for item in fields(LossScaling)} - {"consecutive_hysteresis", "dynamic"}
    assert str(error.value).startswith("LossScaling: 9 errors.")


def test_alone_it_is_torchs_rule_with_a_floor_of_1_that_is_held() -> None:
    alone = LossScaling()
    assert (alone.min_scale, alone.at_min) == (1.0, "hold")
    assert {**asdict(alone), "min_scale": 0.0} == asdict(LossScaling.torch())


# ---------------------------------------------------------------------- the constructors


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (LossScaling.torch(), {"min_scale": 0, "max_scale": None, "growth_interval": 2000, "at_min": "hold"}),
        (LossScaling.deepspeed(), {"growth_interval": 1000, "growth_delay": 1, "at_min": "raise", "dynamic": True}),
        (LossScaling.deepspeed(loss_scale=0.5), {"init_scale": 0.5, "dynamic": False}),
        (LossScaling.megatron(), {"min_scale": 1, "growth_interval": 1000, "at_min": "hold"}),
    ],
    ids=range(4),
)
def test_a_constructor_is_a_choice_of_fields(config: LossScaling, expected: dict[str, Any]) -> None:
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("keys", "given"),
    [
        ({"loss_scale": -1}, "loss_scale=-1"),
        ({"loss_scale": True}, "loss_scale=True"),
        ({"loss_scale": "dynamic"}, "loss_scale='dynamic'"),
        ({"loss_scale": NAN}, "loss_scale=nan"),
        ({"initial_scale_power": 128}, "initial_scale_power=128"),
        ({"initial_scale_power": "16"}, "initial_scale_power='16'"),
        ({"loss_scale_window": 0}, "growth_interval=0"),
        ({"hysteresis": 0}, "hysteresis=0"),
    ],
    ids=str,
)
def test_bad_values_of_deepspeeds_keys_are_refused(keys: dict[str, Any], given: str) -> None:
    with pytest.raises(PlanError) as error:
        LossScaling.deepspeed(**keys)
    assert [fault.problem for fault in error.value.faults] == [given]
