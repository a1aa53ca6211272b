"""``lightning-mp advise CONFIG``: memory by part, the largest micro-batch, and what is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_mp.cli import app
from monitor.report.runs import write_run


def _advised(*arguments: str) -> Any:
    result = CliRunner().invoke(app, ["advise", "experiment=llama_tiny", "plan=bf16", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_a_run_is_predicted_on_a_gpu(tmp_path: Path, own_folder: None) -> None:
    said = json.loads(_advised("--gpu", "t4-16", "--json"))
    assert said["prediction"]["method"] == "traced"
    none, selective, full = (each["prediction"]["peak_bytes"] for each in said["fits"])
    assert said["prediction"]["peak_bytes"] == none > selective > full
    assert all(each["rows"] >= said["rows"] for each in said["fits"])
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_check_measures_here(tmp_path: Path, own_folder: None) -> None:
    said = json.loads(_advised("--check", "--json"))
    assert said["prediction"]["peak_bytes"] == pytest.approx(said["measured"], rel=0.05)
    assert not any(tmp_path.iterdir())


def test_a_gpu_that_is_none_is_refused() -> None:
    refused = CliRunner().invoke(app, ["advise", "experiment=llama_tiny", "--gpu", "h100"])
    assert refused.exit_code == 2
    assert "h100-80" in refused.output


def test_a_run_of_one_s_own_calibrates_the_speed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=130)  # of two processes, 1,000 to 1,006 tokens/s over both
    arguments = ["advise", "--params", "1.3e9", "--gpu", "h200-141", "--gpus", "2", "--json"]
    found = CliRunner().invoke(app, [*arguments, "--calibrate", str(folder)])
    (first, *_) = json.loads(found.stdout)["choices"]
    assert first["tokens_per_s"]["mid"] == pytest.approx(1003 / 2)
    by_number = CliRunner().invoke(app, [*arguments, "--calibrate", "501.5"])
    assert json.loads(by_number.stdout)["choices"][0] == first


def test_a_folder_without_readings_calibrates_nothing(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["advise", "--params", "7e9", "--calibrate", str(tmp_path / "none")])
    assert found.exit_code == 2
    assert "or write the number" in " ".join(found.output.split())
