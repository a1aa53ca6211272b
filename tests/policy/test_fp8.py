"""What may be written of FP8, and what a plan says of it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from lightning_mp import FP8, MixedPrecisionPlan, PlanError, PrecisionPolicy

RULE = FP8(recipe="tensorwise", modules=("*.mlp.*", "head"), skip=(), all_gather=True, small="convert")


def test_the_defaults_are_rowwise_with_bf16_evaluation_and_the_head_left_out() -> None:
    policy = PrecisionPolicy(precision="fp8-mixed")
    assert policy.fp8 == FP8(recipe="rowwise", modules="*", skip=("lm_head",), evaluate="bf16", small="skip")
    assert (policy.storage_dtype, policy.compute_dtype, policy.reduce_dtype) == ("fp32", "bf16", "fp32")
    assert policy.mixed
    assert policy.loss_scaling is None
    assert PrecisionPolicy().fp8 is None


@pytest.mark.parametrize("written", ["tensorwise", {"recipe": "tensorwise"}, FP8(recipe="tensorwise")], ids=str)
def test_a_recipe_a_mapping_and_the_class_say_the_same(written: Any) -> None:
    assert MixedPrecisionPlan("fp8", fp8=written).policy.fp8 == FP8(recipe="tensorwise")


@pytest.mark.parametrize(
    ("fields", "given", "fix"),
    [
        ({"recipe": "row"}, "recipe='row'", "did you mean 'rowwise'"),
        ({"modules": ()}, "modules=()", "write modules="),
        ({"modules": 3}, "modules=3", ""),
        ({"skip": ["a", ""]}, "skip=['a', '']", ""),
        ({"skip": None}, "skip=None", ""),
        ({"all_gather": 1, "recipe": "tensorwise"}, "all_gather=1", "boolean"),
        ({"all_gather": True}, "all_gather=True with recipe='rowwise'", "recipe='tensorwise'"),
        ({"evaluate": "fp16"}, "evaluate='fp16'", "bf16"),
        ({"emulate": "no"}, "emulate='no'", "boolean"),
        ({"small": True}, "small=True", "skip"),
    ],
    ids=str,
)
def test_a_bad_value_is_named(fields: dict[str, Any], given: str, fix: str) -> None:
    with pytest.raises(PlanError) as error:
        FP8(**fields)
    (fault,) = error.value.faults
    assert fault.problem.startswith(given)
    assert fix in fault.fix


def test_all_faults_are_told_at_once() -> None:
    written = {"recipe": "x", "evaluate": "y", "smal": "z", "emulate": 3}
    with pytest.raises(PlanError) as error:
        MixedPrecisionPlan("fp8-mixed", fp8=written, pins={"a": "fp9"})
    assert len(error.value.faults) == 5 - 1 + 1
    assert "unknown key fp8.smal" in str(error.value)


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "auto"])
def test_it_is_refused_beside_another_precision(precision: str) -> None:
    with pytest.raises(PlanError, match="'fp8-mixed'"):
        MixedPrecisionPlan(precision, fp8=FP8())


def test_the_table_says_the_rule() -> None:
    text = " ".join(MixedPrecisionPlan("fp8-mixed", fp8=RULE).describe().split())
    assert repr(RULE) in text
    assert "fp8 where converted" in text


@pytest.mark.slow
def test_neither_the_package_nor_such_a_plan_imports_torchao() -> None:
    code = """
import sys
import lightning_mp
plan = lightning_mp.MixedPrecisionPlan("fp8-mixed", fp8="tensorwise")
plan.describe()
import lightning_mp.strategies, lightning_mp.callbacks, lightning_mp.preflight.doctor
print([name for name in sys.modules if name.startswith("torchao")])
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.strip() == "[]"
