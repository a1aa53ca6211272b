"""``lightning-mp doctor CONFIG``: what it prints, and with what status it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from lightning_mp.cli import app
from lightning_mp.preflight.checks import CHECKS

HEALTHY = """
plan: {precision: 16-mixed, pins: {LayerNorm: fp32}}
model: {_target_: support.hf.gpt2}
trainer: {accelerator: cpu, accumulate_grad_batches: 4}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(HEALTHY)
    return path


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def _refusal(*arguments: object) -> str:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("lightning-mp doctor: ")
    return result.stderr


def test_a_healthy_run_ends_with_0(config: Path) -> None:
    result = _run(config)
    assert result.exit_code == 0
    assert result.output == f"{len(CHECKS)} rules, nothing found\n"


@pytest.mark.parametrize(
    ("overrides", "status", "codes"),
    [
        (["model.dropout=0.1"], 0, []),
        (["plan.pins={LayerNorm: bf16}", "plan.precision=16-true"], 1, ["LMP001", "LMP010"]),
        (["plan.loss_scaling={init_scale: 4294967296}"], 1, ["LMP012"]),
        (["plan.pins={wte: fp32, lm_head: fp16}"], 2, ["LMP009"]),
        (["plan=bf16-true"], 1, ["LMP001", "LMP010"]),
    ],
)
def test_the_status_is_that_of_the_most_severe(
    config: Path, overrides: list[str], status: int, codes: list[str]
) -> None:
    result = _run(config, *overrides)
    assert result.exit_code == status, result.output
    assert all(code in result.stdout for code in codes)
    read = _run(config, *overrides, "--json")
    assert read.exit_code == status
    findings = json.loads(read.stdout)
    assert {finding["code"] for finding in findings} >= set(codes)
    assert all(set(finding) == {"code", "name", "severity", "what", "why", "fix", "where"} for finding in findings)


def test_the_list_reads_what_why_do(config: Path) -> None:
    result = _run(config, "plan=fp16-true", "trainer.accumulate_grad_batches=1")
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0].startswith("LMP001 warning no_fp32_masters")
    assert lines[1].startswith("what: ")
    assert any(line.startswith("why: ") for line in lines)
    assert any(line.startswith("fix: use '16-mixed'") for line in lines)
    assert lines[-1] == f"{len(CHECKS)} rules, 2 found: 0 error, 2 warning, 0 info"


@pytest.mark.slow
def test_it_examines_what_train_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defaults list, groups of one's own and modules beside the file are found as they are there."""
    (tmp_path / "conf" / "plan").mkdir(parents=True)
    (tmp_path / "conf" / "plan" / "ours.yaml").write_text("defaults: [fp16_true]\n")
    (tmp_path / "beside.py").write_text("from support.hf import gpt2 as net\n")
    path = tmp_path / "run.yaml"
    path.write_text("defaults: [{plan: fp32}, {strategy: fsdp2}, _self_]\nmodel: {_target_: beside.net}\n")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    assert _run(path).output == f"{len(CHECKS)} rules, nothing found\n"
    assert "LMP001" in _run(path, "plan=ours", "--config-dir", tmp_path / "conf").stdout
    assert "Could not find 'plan/ours'" in _refusal(path, "plan=ours")
    assert _run("experiment=llama_tiny", "plan=fp16").output == f"{len(CHECKS)} rules, nothing found\n"


# ------------------------------------------------------------------ bad input


def test_what_is_wrong_is_named_together_one_fault_a_line(config: Path) -> None:
    title, *faults = _refusal(
        config, "plan.precision=bf17-mixed", "plan.oops=1", "model._target_=support.nowhere"
    ).splitlines()
    assert title == "lightning-mp doctor: 3 errors"
    for said in ("'bf17-mixed'", "unknown key oops", "support.nowhere"):
        assert sum(said in line for line in faults) == 1
    assert "t4-16" in _refusal(config, "--gpu=t4")
