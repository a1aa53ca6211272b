"""``lightning-mp advise CONFIG``: memory by part, the largest micro-batch, and what is measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lightning_mp.cli import app
from monitor.report.runs import write_run
from support.training import PLAIN, write


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


OWN = """
from support.training import Net, loader

class Unstepped(Net):
    def training_step(self, batch, batch_idx):
        raise KeyError("input_ids")

class Endless:
    def __iter__(self):
        while True:
            yield from loader(4)
"""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("training.Net", "training.Net"), "on 1 device, "),
        (("accelerator: cpu\n  devices: 1", "accelerator: gpu\n  devices: [0, 1]"), "By: traced"),
        (("accelerator: cpu\n  devices: 1", "accelerator: gpu\n  devices: '0,1'"), "on 2 devices"),
        (("accelerator: cpu\n  devices: 1", "accelerator: gpu\n  devices: auto"), "on 1 device, "),
        (("support.training.loader\n  rows: 12", "own_parts.Endless"), "By: traced"),
        (
            ("support.training.Net", "own_parts.Unstepped"),
            "raised KeyError: 'input_ids' (own_parts.py:6)",
        ),
        (("support.training.Net", "own_parts.Unstepped"), "the largest micro-batch is not known"),
    ],
)
def test_a_config_is_predicted_where_its_devices_are_not_and_what_cannot_be_is_said(
    change: tuple[str, str], said: str, tmp_path: Path, own_folder: None
) -> None:
    assert change[0] in PLAIN
    write(tmp_path, OWN, "own_parts.py")
    path = write(tmp_path, PLAIN.replace(*change))
    found = CliRunner().invoke(app, ["advise", path])
    assert found.exit_code == 0, found.output
    assert said in found.stdout
    refused = CliRunner().invoke(app, ["advise", path, "--gpus", "4", "--price", "2"])
    assert (refused.exit_code, "--gpus, --price next to a CONFIG" in refused.output) == (2, True)


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
