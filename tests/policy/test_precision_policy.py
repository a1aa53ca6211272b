"""The policy: what may be written, what it is normalised to, and every fault of it at once."""

from __future__ import annotations

import io
import json
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from lightning_mp import FP8, Checkpointing, LossScaling, MixedPrecisionPlan, NonFinite, Pin, PlanError, PrecisionPolicy
from lightning_mp.policy.precision_policy import TF32_SETTINGS
from support.policies import policies

# ---------------------------------------------------------------------- round trips


@settings(max_examples=60)
@given(policy=policies())
def test_a_policy_is_the_mapping_it_is_written_as(policy: PrecisionPolicy) -> None:
    written = policy.to_dict()
    assert written.keys() == {item.name for item in fields(PrecisionPolicy)}
    assert PrecisionPolicy.from_dict(written) == policy
    assert PrecisionPolicy.from_dict(json.loads(json.dumps(written))) == policy


@settings(max_examples=20)
@given(policy=policies())
def test_a_checkpoint_with_a_policy_loads_with_weights_only(policy: PrecisionPolicy) -> None:
    file = io.BytesIO()
    torch.save(policy.to_dict(), file)
    file.seek(0)
    assert PrecisionPolicy.from_dict(torch.load(file, weights_only=True)) == policy


NAMES = {kind.__name__: kind for kind in (FP8, Checkpointing, LossScaling, NonFinite, Pin, PrecisionPolicy)}
NAMES["MixedPrecisionPlan"] = MixedPrecisionPlan


@settings(max_examples=60)
@given(policy=policies())
def test_what_is_printed_builds_it_again(policy: PrecisionPolicy) -> None:
    assert eval(repr(policy), NAMES) == policy
    assert eval(repr(MixedPrecisionPlan.from_policy(policy)), NAMES).policy == policy


def test_a_policy_is_frozen_hashable_and_takes_keywords_only() -> None:
    policy = PrecisionPolicy(pins={"*norm*": "fp32"}, checkpointing="Block")  # type: ignore[arg-type]
    with pytest.raises(FrozenInstanceError):
        policy.precision = "auto"  # type: ignore[misc]
    with pytest.raises(TypeError):
        PrecisionPolicy("auto")  # type: ignore[misc]
    assert hash(policy) == hash(PrecisionPolicy.from_dict(policy.to_dict()))


# ---------------------------------------------------------------------- what the modes are


@pytest.mark.parametrize(
    ("precision", "stored", "computed", "mixed", "scaled"),
    [
        ("32-true", "fp32", "fp32", False, False),
        ("bf16-mixed", "fp32", "bf16", True, False),
        ("16-mixed", "fp32", "fp16", True, True),
        ("bf16-true", "bf16", "bf16", False, False),
        ("16-true", "fp16", "fp16", False, True),
    ],
)
def test_a_mode(precision: str, stored: str, computed: str, mixed: bool, scaled: bool) -> None:
    policy = PrecisionPolicy(precision=precision)
    assert (policy.storage_dtype, policy.compute_dtype, policy.mixed) == (stored, computed, mixed)
    assert policy.loss_scaling == (LossScaling() if scaled else None)
    assert policy.reduce_dtype == "fp32"


def test_the_default_is_bf16_mixed_that_skips_non_finite_steps() -> None:
    policy = PrecisionPolicy()
    assert policy.precision == "bf16-mixed"
    assert policy.nonfinite == NonFinite(action="skip", max_consecutive=100)


# ---------------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *[(alias, "fp32") for alias in ("fp32", "float32", "float", "32", 32, torch.float32, "torch.float32", "FP32")],
        *[(alias, "bf16") for alias in ("bf16", "bfloat16", torch.bfloat16, "torch.bfloat16", "BFloat16")],
        *[(alias, "fp16") for alias in ("fp16", "float16", "half", "16", 16, torch.float16, torch.half)],
    ],
    ids=str,
)
def test_a_dtype_has_one_name(written: Any, name: str) -> None:
    assert Pin("norm", written).dtype == PrecisionPolicy(reduce_dtype=written).reduce_dtype == name


@pytest.mark.parametrize("written", ["fp64", torch.float64, "int8", torch.int8, None, "flaot32", torch, "tf32", "fp8"])
def test_what_is_no_format_to_store_in_is_refused_with_the_list(written: Any) -> None:
    with pytest.raises(PlanError) as error:
        Pin("norm", written)
    (fault,) = error.value.faults
    assert (fault.problem, fault.allowed) == (f"pin 'norm': dtype={written!r}", "fp32, bf16, fp16")


# ---------------------------------------------------------------------- forms

NORM = (Pin("*norm*", "fp32"),)


@pytest.mark.parametrize(
    ("pins", "expected"),
    [
        (None, ()),
        ({}, ()),
        ([], ()),
        ({"*norm*": "fp32"}, NORM),
        ({"*norm*": torch.float32}, NORM),
        ({"*norm*": {"dtype": "float32"}}, NORM),
        ({"*norm*": Pin("ignored", "fp32")}, NORM),
        ([Pin("*norm*", "fp32")], NORM),
        ([{"pattern": "*norm*", "dtype": "fp32"}], NORM),
        (iter(NORM), NORM),
        ({"a": {"dtype": "fp16", "output": torch.float32}}, (Pin("a", "fp16", "fp32"),)),
        ({"a": {"dtype": "bf16", "accumulate": torch.float32}}, (Pin("a", "bf16", accumulate="fp32"),)),
        ({"b": "bf16", "a": "fp32"}, (Pin("b", "bf16"), Pin("a", "fp32"))),
    ],
    ids=range(13),
)
def test_pins_may_be_written_in_many_forms(pins: Any, expected: tuple[Pin, ...]) -> None:
    assert PrecisionPolicy(pins=pins).pins == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [(None, None), (True, "high"), (False, "highest"), *[(setting, setting) for setting in TF32_SETTINGS]],
)
def test_tf32_may_be_a_switch_or_torchs_word(written: Any, expected: str | None) -> None:
    assert PrecisionPolicy(tf32=written).tf32 == expected
