"""Bad input: every fault of every field at once, each with what was given, what is allowed and what to do."""

from __future__ import annotations

import inspect
from dataclasses import asdict
from typing import Any

import pytest

from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError, PrecisionPolicy
from lightning_mp.policy import PRECISIONS

MODES = ", ".join(PRECISIONS)
STORED = "fp32, bf16, fp16"

#: fields → what was given, what is allowed, what to do; parts of the message
BAD: list[tuple[dict[str, Any], str, str, str]] = [
    ({"precision": "fp8-true"}, "precision='fp8-true'", MODES, "did you mean"),
    ({"precision": "half-mixd"}, "precision='half-mixd'", MODES, "did you mean '16-mixed'?"),
    ({"precision": "64-true"}, "precision='64-true'", MODES, "double precision is not offered"),
    ({"precision": "A100"}, "precision='A100'", MODES, "MixedPrecisionPlan.preset('a100')"),
    ({"precision": None}, "precision=None", MODES, "write one of these"),
    *[
        (
            {"precision": mode, "loss_scaling": LossScaling()},
            f"loss_scaling with precision={mode!r}",
            "16-mixed, 16-true, auto",
            "remove loss_scaling",
        )
        for mode in ("bf16-mixed", "32-true", "bf16-true")
    ],
    ({"precision": "16", "loss_scaling": 128}, "loss_scaling=128", "LossScaling(...)", "write LossScaling(...)"),
    ({"precision": "16-mixed", "loss_scaling": {"init_scale": 0}}, "init_scale=0", "a finite number > 0", "65536"),
    (
        {"precision": "16-mixed", "loss_scaling": {"intial_scale": 8}},
        "unknown key loss_scaling.intial_scale",
        "init_scale, growth_factor",
        "'init_scale'",
    ),
    ({"pins": "*norm*"}, "pins='*norm*'", "a mapping of pattern to dtype", "pins={'*norm*': 'fp32'}"),
    ({"pins": {"*norm*": "fp64"}}, "pin '*norm*': dtype='fp64'", STORED, ""),
    ({"pins": {"": "fp32"}}, "pattern=''", "a non-empty fnmatch pattern", "'*norm*'"),
    (
        {"pins": [{"pattern": "a", "dtyp": "fp32", "dtype": "fp32"}]},
        "unknown key pins.dtyp",
        "pattern, dtype",
        "'dtype'",
    ),
    ({"pins": {"a": {"dtype": "fp32", "output": "same"}}}, "pin 'a': output='same'", "pin, input", ""),
    ({"pins": {"a": {"dtype": "bf16", "accumulate": "bf16"}}}, "pin 'a': accumulate='bf16'", "'fp32'", "leave it out"),
    ({"pins": {"a": {"dtype": "fp32", "accumulate": "fp32"}}}, "pin 'a': accumulate with dtype='fp32'", "", "'bf16'"),
    (
        {"pins": {"a": {"dtype": "bf16", "accumulate": "fp32", "output": "bf16"}}},
        "pin 'a': accumulate with output='bf16'",
        "",
        "leave output out",
    ),
    ({"tf32": "on"}, "tf32='on'", "None, True, False, 'highest', 'high', 'medium'", "write 'high'"),
    ({"checkpointing": {}}, "checkpointing={}", "the fields of Checkpointing", "add 'modules'"),
    ({"checkpointing": {"modules": ""}}, "modules=''", "a pattern, a module class, or several", "'*.h.*'"),
    ({"checkpointing": {"modules": "a", "mode": "some"}}, "mode='some'", "'full', 'selective'", ""),
    ({"checkpointing": {"modules": "a", "every": 0}}, "every=0", "a whole number >= 1", "1"),
    (
        {"checkpointing": {"modules": "a", "save_ops": ["mm"]}},
        "save_ops with mode='full'",
        "",
        "selective",
    ),
    ({"nonfinite": "stop"}, "nonfinite='stop'", "'skip', 'raise', 'ignore'", "'skip'"),
    ({"nonfinite": {"max_consecutive": -1}}, "max_consecutive=-1", "a whole number >= 0", "100"),
    ({"reduce_dtype": "fp8"}, "reduce_dtype='fp8'", STORED, "fp8 is no storage format"),
]


@pytest.mark.parametrize(("fields", "given", "allowed", "fix"), BAD, ids=[row[1] for row in BAD])
def test_a_fault_says_what_was_given_what_is_allowed_and_what_to_do(
    fields: dict[str, Any], given: str, allowed: str, fix: str
) -> None:
    with pytest.raises(PlanError) as error:
        PrecisionPolicy(**fields)
    (fault,) = error.value.faults
    assert fault.problem == given
    assert allowed in fault.allowed
    assert fix in fault.fix
    assert fault.fix
    assert str(fault) in str(error.value)
    with pytest.raises(PlanError) as of_plan:
        MixedPrecisionPlan(**fields)
    assert of_plan.value.faults == error.value.faults


@pytest.mark.parametrize(
    ("keyword", "fix"),
    [
        ("pin", "did you mean 'pins', 'precision'?"),
        ("gradient_checkpointing", "did you mean 'checkpointing'?"),
        ("lossscale", "did you mean 'loss_scaling'?"),
        ("zzz", "remove it"),
    ],
)
def test_a_keyword_the_plan_does_not_have_is_refused(keyword: str, fix: str) -> None:
    """With the nearest, and all there are."""
    with pytest.raises(PlanError) as error:
        MixedPrecisionPlan("16-mixed", **{keyword: None})  # type: ignore[arg-type]
    (fault,) = error.value.faults
    assert (fault.problem, fault.fix) == (f"unknown argument '{keyword}'", fix)
    assert fault.allowed == ", ".join(["precision", *inspect.signature(MixedPrecisionPlan).parameters][1:])


def test_every_fault_of_every_field_is_told_at_once() -> None:
    with pytest.raises(PlanError) as error:
        PrecisionPolicy.from_dict(
            {
                "precision": "17-mixed",
                "loss_scaling": {"init_scale": -1, "growth_factor": 0.5, "grwth_interval": 3},
                "pins": [{"pattern": "a", "dtype": "fp12"}, "b", {"pattern": "c", "dtype": "bf16", "outptu": "pin"}],
                "tf32": "on",
                "checkpointing": {"modules": "a", "mode": "some", "every": 0},
                "nonfinite": {"action": "stop", "max_consecutive": -1},
                "reduce_dtype": "int8",
                "buffer_dtype": "fp99",
                "precison": "16-mixed",
            }
        )
    assert sorted(fault.problem for fault in error.value.faults) == sorted(
        [
            "unknown key precison",
            "precision='17-mixed'",
            "unknown key loss_scaling.grwth_interval",
            "init_scale=-1",
            "growth_factor=0.5",
            "pin 'a': dtype='fp12'",
            "pins=['b']",
            "unknown key pins.outptu",
            "tf32='on'",
            "mode='some'",
            "every=0",
            "nonfinite='stop'",
            "max_consecutive=-1",
            "reduce_dtype='int8'",
            "buffer_dtype='fp99'",
        ]
    )
    assert str(error.value).startswith("MixedPrecisionPlan: 15 errors.")


# ---------------------------------------------------------------------- loss scaling

NAN, INF = float("nan"), float("inf")
FRACTION, WHOLE = "a number between 0 and 1, both left out", "a whole number >= "

OUT_OF_RANGE: list[tuple[dict[str, Any], str, str]] = [
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


@pytest.mark.parametrize(("written", "given", "allowed"), OUT_OF_RANGE, ids=[row[1] for row in OUT_OF_RANGE])
def test_a_value_out_of_its_range_is_refused(written: dict[str, Any], given: str, allowed: str) -> None:
    with pytest.raises(PlanError) as error:
        LossScaling(**written)
    (fault,) = error.value.faults
    assert fault.problem == given
    assert allowed in fault.allowed
    assert fault.fix


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
