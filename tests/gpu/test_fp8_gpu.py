"""FP8 on CUDA: what is watched waits for nothing between readings, is the CPU's number, and compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import fp8
from support.fp8_faults import watched

pytest.importorskip("torchao")
CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAPABLE, reason="needs a CUDA device of capability 8.9")]
#: on the device, with its own FP8 products
HERE: dict[str, Any] = {"accelerator": "gpu", "rule": {"emulate": False}}


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_the_first_reading_is_the_cpus(recipe: str, tmp_path: Path) -> None:
    """Of the same weights and tokens: inputs of the first layer and weights are equal, gradients near."""
    here, _, _ = watched(tmp_path / "gpu", recipe, steps=1, **HERE)
    there, _, _ = watched(tmp_path / "cpu", recipe, steps=1)
    for layer, roles in there.fp8_rows[0]["layers"].items():
        mine = here.fp8_rows[0]["layers"][layer]
        assert mine["weight"] == pytest.approx(roles["weight"])
        for role in ("input", "gradient"):
            assert mine[role]["amax"] == pytest.approx(roles[role]["amax"], rel=0.1)


@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_compiled_by_inductor_it_is_seen_as_well(tmp_path: Path) -> None:
    plain, _, _ = watched(tmp_path / "plain", steps=3, **HERE)
    compiled, _, _ = watched(tmp_path / "compiled", steps=3, compiled="inductor", **HERE)
    for row, other in zip(compiled.fp8_rows, plain.fp8_rows, strict=True):
        for layer, roles in row["layers"].items():
            for role, numbers in roles.items():
                assert numbers["amax"] == pytest.approx(other["layers"][layer][role]["amax"], rel=0.1)
