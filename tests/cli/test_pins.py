"""``lightning-mp pins``: what to pin of the run that a config describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_mp.cli import app

RUN_OF_A_NORM = """\
plan: 16-mixed
model: {_target_: test_pin_advice.Normed}
data: {_target_: test_pin_advice.loader}
trainer: {accelerator: cpu, devices: 1, max_steps: 3, logger: false}
"""
RUN = ("experiment=llama_tiny", "plan=bf16", "trainer.accelerator=cpu", "callbacks=none", "--steps", "1")


def test_a_run_that_needs_no_pins_says_so_and_writes_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pins", *RUN, f"run_dir={tmp_path / 'run'}"])
    assert result.exit_code == 0, result.output
    assert "No pins: under bf16-mixed" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_as_json_it_is_pins_and_rows(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["pins", *RUN, "--json", f"run_dir={tmp_path / 'run'}"])
    assert json.loads(result.stdout) == {"pins": {}, "rows": []}


@pytest.mark.slow
def test_what_is_suggested_is_confirmed_when_asked(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(RUN_OF_A_NORM)
    result = CliRunner().invoke(app, ["pins", str(run), "--confirm", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["pins"], found["confirmed"]) == ({"norm": "fp32"}, True)


def test_without_a_config_it_says_what_to_write() -> None:
    result = CliRunner().invoke(app, ["pins"])
    assert result.exit_code == 2
    assert "ithout a run" in result.output
    result = CliRunner().invoke(app, ["pins", "model=gpt2_tiny", "plan=null"])
    assert (result.exit_code, "section 'plan'" in result.output) == (2, True)
