"""``python -m benchmarks.gpu``: every part runs, here with tiny models, and one that fails costs the others nothing."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu


@pytest.mark.slow
@pytest.mark.whole
def test_every_part_runs_and_the_page_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.main(["--out", str(tmp_path), "--quick"]) == 0, (tmp_path / "gpu.md").read_text()
    ladder = json.loads((tmp_path / "ladder.json").read_text())
    assert ladder["fp32"]["last loss"] == pytest.approx(ladder["bf16"]["last loss"], rel=2e-2)
    assert ladder["bf16 + checkpointing"]["last loss"] == ladder["bf16"]["last loss"]
    assert (tmp_path / "gpu.md").read_text().count("\n## ") == len(gpu.PARTS)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_device_a_part_says_so_and_one_that_hangs_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gpu.PARTS, "overhead", (gpu.overhead, 1))  # not even torch is imported by then
    assert gpu.main(["--out", str(tmp_path), "--parts", "overhead", "mfu"]) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "timed out after" in page
    assert "This part needs a CUDA device" in page


def test_the_parts_fit_into_thirteen_minutes() -> None:
    assert sum(seconds for _, seconds in gpu.PARTS.values()) <= 13 * 60


def test_the_share_of_a_peak_names_the_peak() -> None:
    assert gpu.of_peak(494.75e12, 989.5e12) == "50.0% of 989.5"
    assert gpu.of_peak(1e12, None) == "-"
