"""``lightning-mp audit``: declared against observed, with an exit status for scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lightning_mp.cli import app

SMALL = ("trainer.accelerator=cpu", "callbacks=none", "data.val_batches=1")


def _audit(folder: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["audit", *arguments, f"run_dir={folder}"])


def test_as_declared_is_status_0_a_table_and_its_files(tmp_path: Path) -> None:
    result = _audit(tmp_path, "experiment=llama_tiny", "plan=bf16", *SMALL)
    assert result.exit_code == 0, result.output
    assert "all as declared by MixedPrecisionPlan" in result.stdout
    assert "lm_head" in result.stdout
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["ok"]
    assert written["rows"]
    assert (tmp_path / "audit.md").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"audit.json", "audit.md", "run.json"}


_UNFAITHFUL = """
import torch
from lightning_mp.demo.language_model import CausalLM

class Upcasts(CausalLM):
    def forward(self, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            return super().forward(*args, **kwargs)

    def training_step(self, batch, batch_idx):
        with torch.autocast("cpu", enabled=False):
            return super().training_step(batch, batch_idx)
"""

_RUN = """
plan: bf16
defaults: [{data: library_text}, {model: llama_tiny}, {callbacks: default}, _self_]
model: {_target_: unfaithful.Upcasts}
"""


def test_a_module_that_is_not_as_declared_is_status_1(tmp_path: Path) -> None:
    (tmp_path / "unfaithful.py").write_text(_UNFAITHFUL)
    (tmp_path / "run.yaml").write_text(_RUN)
    result = _audit(tmp_path / "run", str(tmp_path / "run.yaml"), *SMALL)
    assert result.exit_code == 1, result.output
    assert "not as declared" in result.stdout
    as_json = _audit(tmp_path / "json", str(tmp_path / "run.yaml"), *SMALL, "--json")
    assert as_json.exit_code == 1
    assert not json.loads(as_json.stdout)["ok"]
    assert not json.loads((tmp_path / "run" / "audit.json").read_text())["ok"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "audit without a run"),
        (("experiment=llama_tiny", "--steps", "0"), "--steps=0"),
        (("missing.yaml",), "which is no file"),
        (("experiment=llama_tiny", "plan=fp17"), "could not find 'plan/fp17'"),
    ],
)
def test_bad_input_is_status_2_and_one_message(arguments: tuple[str, ...], says: str) -> None:
    result = CliRunner().invoke(app, ["audit", *arguments])
    assert result.exit_code == 2
    assert says.lower() in result.stderr.lower()
    assert "Traceback" not in result.stderr
