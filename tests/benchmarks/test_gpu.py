"""``python -m benchmarks.gpu``: every part runs, here with tiny models, and one that fails costs the others nothing."""

import json
from pathlib import Path

import pytest

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


def test_the_parts_fit_into_thirteen_minutes() -> None:
    assert sum(seconds for _, seconds in gpu.PARTS.values()) <= 13 * 60
