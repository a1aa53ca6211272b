"""``python -m benchmarks.gpu``: every part runs, here with tiny models, and each survives the failure of the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import cuda_tests, measure, page
from lightning_mp.policy import hardware

ROOT = Path(__file__).resolve().parents[2]
#: what the machine that the command is made for lacks; deepspeed too, which transformers imports wherever it is there
ABSENT = ("omegaconf", "hydra", "jsonargparse", "typer")


def run(out: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(out), *arguments]
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **environment}
    return subprocess.run(command, cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.slow
def test_every_part_runs_where_only_torch_lightning_and_transformers_are(tmp_path: Path) -> None:
    blocker = tmp_path / "site" / "sitecustomize.py"
    blocker.parent.mkdir()
    blocker.write_text(
        "import sys\nclass Absent:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {ABSENT!r}:\n            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    done = run(tmp_path / "out", "--quick", PYTHONPATH=str(blocker.parent))
    assert done.returncode == 0, done.stdout + done.stderr
    results: dict[str, Any] = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["parts"]) == list(command.PARTS)
    assert all(part["ok"] and part["figures"] for part in results["parts"].values())
    ladder = results["parts"]["ladder"]["figures"]
    assert ladder["fp32"]["loss"] == pytest.approx(ladder["bf16"]["loss"], rel=2e-2)
    assert ladder["bf16 + checkpointing"]["loss"] == ladder["bf16"]["loss"]
    text = (tmp_path / "out" / "gpu.md").read_text()
    assert "these figures mean nothing" in text
    assert text.count("\n## ") == len(command.PARTS)


@pytest.mark.slow
def test_without_a_device_every_part_says_so_and_the_page_is_written(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts", "sync", "mfu")
    assert done.returncode == 1
    text = (tmp_path / "gpu.md").read_text()
    assert text.count("This part needs a CUDA device") == 2


@pytest.mark.slow
def test_a_part_that_hangs_or_dies_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.PARTS, "sync", 1)  # not even torch is imported by then
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main(["--out", str(tmp_path), "--parts", "sync", "ladder", "--quick"]) == 1
    parts = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert parts["sync"]["error"].endswith("not done after 1 s")
    assert parts["ladder"]["ok"]


def test_the_parts_fit_into_nine_minutes() -> None:
    assert sum(command.PARTS.values()) <= 9 * 60


def test_every_file_of_cuda_tests_has_its_place() -> None:
    files = sorted(cuda_tests.FOLDER.glob("test_*_gpu.py"))
    assert {cuda_tests._name(file) for file in files} >= set(cuda_tests.ORDER)


def test_figures_that_a_part_had_before_it_failed_are_shown() -> None:
    figures = {"bf16-mixed": {"steps": 50, "waited": True, "error": "called a synchronizing CUDA operation"}}
    part = {"ok": False, "error": "Traceback\nexit status 1", "seconds": 1.0, "figures": figures}
    machine = {"date": "2030-01-01", "device": "some GPU", "torch": "2.11.0+cu130", "peft": None}
    text = page.markdown({"machine": machine, "quick": False, "parts": {"sync": part}})
    assert "2030-01-01, some GPU; torch 2.11.0+cu130." in text
    assert "| `bf16-mixed` | 50 | yes: called a synchronizing CUDA operation |" in text
    assert "exit status 1" in text


def test_mfu_is_the_share_of_a_peak_that_is_named() -> None:
    h200 = hardware.Peak(989.5e12, "H200 data sheet")
    assert measure.of_peak(494.75e12, h200) == {"mfu": 0.5, "peak": "989.5 TFLOP/s (H200 data sheet)"}
    assert measure.of_peak(1e12, None) == {"mfu": None, "peak": None}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_on_a_gpu_a_part_measures(tmp_path: Path) -> None:
    done = run(tmp_path, "--parts", "sync", CUDA_VISIBLE_DEVICES=os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    assert done.returncode == 0, (tmp_path / "gpu.md").read_text()
