"""Presets that an installed package adds by an entry point."""

from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from lightning_mp import MixedPrecisionPlan
from support.running import faults_of


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a package with three presets: a good one, one under a taken name, and a number."""
    (tmp_path / "house_presets.py").write_text(
        "OURS = {'precision': 'bf16-mixed', 'pins': {'norms': 'fp32'}, 'tf32': 'high'}\nNUMBER = 3\n"
    )
    notes = tmp_path / "house_presets-1.0.dist-info"
    notes.mkdir()
    (notes / "METADATA").write_text("Metadata-Version: 2.1\nName: house-presets\nVersion: 1.0\n")
    names = "ours = house_presets:OURS", "a100 = house_presets:OURS", "number = house_presets:NUMBER"
    (notes / "entry_points.txt").write_text("\n".join(["[lightning_mp.presets]", *names, ""]))
    monkeypatch.syspath_prepend(tmp_path)
    looked_up: Any = metadata.entry_points  # tests/support keeps what it found once
    looked_up.cache_clear()
    yield
    looked_up.cache_clear()


@pytest.mark.usefixtures("package")
def test_a_preset_of_another_package_is_a_plan() -> None:
    plan = MixedPrecisionPlan.preset("ours")
    assert plan.policy == MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"}, tf32="high").policy


@pytest.mark.usefixtures("package")
def test_a_preset_of_this_package_wins() -> None:
    assert MixedPrecisionPlan.preset("a100").policy == MixedPrecisionPlan("bf16-mixed", tf32="high").policy


@pytest.mark.usefixtures("package")
def test_a_preset_that_is_no_mapping_is_refused() -> None:
    (fault,) = faults_of(lambda: MixedPrecisionPlan.preset("number"))
    assert "reset 'number' is 3, from the entry point house_presets:NUMBER" in str(fault)


@pytest.mark.usefixtures("package")
def test_an_unknown_preset_is_answered_with_all_names() -> None:
    (fault,) = faults_of(lambda: MixedPrecisionPlan.preset("our"))
    assert "ours" in fault.allowed
    assert "did you mean 'ours'" in fault.fix
