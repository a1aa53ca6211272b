"""What can be compared: words, presets, files and plans, by the names they are told by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_mp import FP8, MixedPrecisionPlan, PrecisionPolicy
from lightning_mp.comparison.compare import read_plans as read
from lightning_mp.errors import Faults


def _read(plans: Any) -> dict[str, PrecisionPolicy]:
    faults = Faults()
    found = read(plans, faults)
    faults.raise_if_any()
    return found


def test_names(tmp_path: Path) -> None:
    file = tmp_path / "narrow.yaml"
    file.write_text("precision: fp8-mixed\nfp8: {recipe: tensorwise, small: convert}\n")
    found = _read(f"bf16-mixed, fp16,a100,bf16-mixed,{file},{file}")
    assert list(found) == ["bf16-mixed", "fp16", "a100", "bf16-mixed (2)", "narrow", "narrow (2)"]
    assert found["fp16"].precision == "16-mixed"
    assert found["a100"].tf32 == "high"
    assert found["narrow"].fp8 == FP8(recipe="tensorwise", small="convert")


def test_a_mapping_has_its_own_names() -> None:
    plan = MixedPrecisionPlan("fp8-mixed", fp8="tensorwise")
    found = _read({"one": plan, "two": {"precision": "32-true"}, "three": plan.policy})
    assert list(found) == ["one", "two", "three"]
    assert found["one"] == found["three"] == plan.policy
    assert list(_read([plan, {"precision": "32-true"}])) == ["fp8-mixed", "32-true"]


@pytest.mark.parametrize(
    ("plans", "given", "fix"),
    [
        ("bf16-mixed,bf17-mixed", "plan 'bf17-mixed'", "'bf16-mixed'"),
        ("bf16-mixed,none.yaml", "config 'none.yaml', which is no file", "path"),
        ("bf16-mixed", "1 plan", "bf16-mixed,fp8-mixed"),
        ("", "0 plans", "bf16-mixed,fp8-mixed"),
        ([{"precision": "bf16-mixed", "pinz": {}}, "bf16"], "unknown key pinz", "'pins'"),
        ([3.5, "bf16"], "plan 3.5", "bf16"),
    ],
)
def test_refused(plans: Any, given: str, fix: str) -> None:
    faults = Faults()
    read(plans, faults)
    (fault,) = faults.found
    assert given in fault.problem
    assert fix in fault.fix or fix in fault.allowed
