"""The doctor as a whole: healthy runs, what it takes, that it leaves everything as it was, and what ``fit`` says."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import HalfPrecision, MixedPrecision
from torch import nn
from typer.testing import CliRunner, Result

from lightning_mp import MixedPrecisionPlan, PlanError, PrecisionPolicy
from lightning_mp.cli import app
from lightning_mp.preflight.doctor import CHECKS, doctor
from lightning_mp.record.findings import Finding
from support import hf
from support.comparing import same, state_of
from support.doctor import A100, CPU, Tagger, Wrapped, bert, found, net, resnet
from support.models import Regression
from support.oracles import MODES, plan_for
from support.running import fit

HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "llama": hf.llama, "llama with LoRA": lambda: hf.llama(lora=True), "gpt2": hf.gpt2, "bert": bert,
    "bert classifying": lambda: bert(labels=True), "resnet": resnet, "lstm": Tagger, "regression": Regression,
}  # fmt: skip
#: everything a true mode is told of a model that is well otherwise
TRUE_MODES = {"no_fp32_masters", "norm_in_half"}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("device", [CPU, A100])
@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_healthy_run_has_no_findings(name: str, mode: str, device: Any) -> None:
    trainer = {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0, "devices": 2}
    for plan in (mode, MixedPrecisionPlan(mode, tf32="high"), {"precision": mode, "tf32": "high"}):
        if plan == "32-true" and device is A100:
            continue  # stock, on a device whose TF32 is off
        if name == "lstm" and mode != "32-true" and device is CPU and plan != mode:
            continue  # a plan is refused where oneDNN has no such LSTM
        assert found(HEALTHY[name](), plan, "auto", trainer, device=device) == {}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("mode", ["bf16-true", "16-true"])
def test_a_true_mode_is_told_no_more_than_that_it_is_one(name: str, mode: str) -> None:
    told = TRUE_MODES | ({"eps_underflows"} if mode == "16-true" and "bert" in name else set())  # its eps is 1e-12
    assert set(found(HEALTHY[name](), MixedPrecisionPlan(mode))) <= told


class Sick(Wrapped):
    """Something for every check to look at."""

    def __init__(self) -> None:
        model = nn.Sequential(
            nn.Linear(16, 15), nn.LayerNorm(15, eps=1e-12), nn.Dropout(0.5), nn.BatchNorm1d(15)
        ).eval()
        super().__init__(model, torch.optim.AdamW)
        self.calls = 0
        model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stock", [False, True])
def test_the_model_is_left_as_it_is(mode: str, stock: bool) -> None:
    model = Sick()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = state_of(model)
    plan = mode if stock else MixedPrecisionPlan(mode)
    assert doctor(model, plan, "auto", {"accumulate_grad_batches": 4}, device=A100)
    assert same(state_of(model), before)
    assert model.calls == 0


def test_the_most_severe_comes_first() -> None:
    severities = [finding.severity for finding in doctor(Sick(), "16-true", device=A100)]
    assert severities == sorted(severities, key=["error", "warning", "info"].index)
    assert len(set(severities)) == 3


@pytest.mark.parametrize(
    "plan",
    [
        MixedPrecisionPlan("bf16-true"), PrecisionPolicy(precision="bf16-true"), {"precision": "bf16-true"},
        "bf16-true", HalfPrecision("bf16-true"),
    ],
)  # fmt: skip
def test_a_plan_may_be_given_in_every_way(plan: Any) -> None:
    assert "no_fp32_masters" in found(net(), plan)
    assert "no_fp32_masters" in found(
        net(), None, None, {"plugins": [plan] if hasattr(plan, "precision") else None, "precision": "bf16-true"}
    )


def test_a_stock_scalers_own_scale_is_looked_at() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    assert "scale_overflows_at_once" in found(net(), MixedPrecision("16-mixed", "cpu", scaler))


@pytest.mark.parametrize(
    ("model", "plan", "said"),
    [
        (None, "bf16-mixed", "model=None"),
        ("net", None, "model='net'"),
        (net(), "bf17-mixed", "Did you mean 'bf16-mixed'"),
        (net(), {"precision": "bf16-mixed", "pin": {}}, "Did you mean 'pins'"),
    ],
)
def test_what_is_no_model_or_no_plan_is_refused(model: Any, plan: Any, said: str) -> None:
    with pytest.raises(PlanError) as caught:
        doctor(model, plan)
    assert said in str(caught.value)


ODD: dict[str, Callable[[], nn.Module]] = {
    "without parameters": nn.ReLU,
    "lazy": lambda: nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d()),
    "on the meta device": lambda: nn.Sequential(nn.Linear(8, 8, device="meta"), nn.RMSNorm(8, device="meta")),
    "scripted": lambda: torch.jit.trace(nn.Linear(8, 8), torch.ones(1, 8)),
    "compiled": lambda: torch.compile(net()),  # type: ignore[return-value]
    "complex": lambda: nn.ParameterList([nn.Parameter(torch.ones(2, dtype=torch.complex64))]),
    "a frozen one": lambda: net().requires_grad_(False),
    "partitioned, with nothing left here": lambda: nn.ParameterList([nn.Parameter(torch.empty(0))]),
    "an untrained Lightning": lambda: Wrapped(net(), optimizers=None),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:Lazy modules:UserWarning")
def test_no_model_is_too_odd(name: str, mode: str) -> None:
    for plan in (mode, MixedPrecisionPlan(mode)):
        trainer = {"accumulate_grad_batches": "4", "callbacks": 3, "devices": "auto", "accelerator": object()}
        for finding in doctor(ODD[name](), plan, object(), trainer):
            assert isinstance(finding, Finding)


@pytest.mark.parametrize("mode", MODES)
def test_one_warning_names_code_and_command_and_a_healthy_fit_says_nothing(mode: str) -> None:
    asleep = Regression()
    asleep.net.eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Regression(), plugins=[plan_for(mode)])
        fit(asleep, plugins=[plan_for(mode)])
    (text,) = [said for item in caught if (said := str(item.message)).startswith("before the first step:")]
    assert "LMP003 eval_mode: " in text
    assert "'lightning-mp doctor CONFIG'" in text


CONFIG = """
plan: {precision: 16-mixed, pins: {LayerNorm: fp32}}
model: {_target_: support.hf.gpt2}
trainer: {accelerator: cpu, accumulate_grad_batches: 4}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(CONFIG)
    return path


HEALTHY_OUTPUT = f"{len(CHECKS)} rules, nothing found\n"


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def _refusal(*arguments: object) -> str:
    result = _run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("lightning-mp doctor: ")
    return result.stderr


def test_a_healthy_run_ends_with_0(config: Path) -> None:
    result = _run(config)
    assert (result.exit_code, result.output) == (0, HEALTHY_OUTPUT)


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
def test_the_status_is_of_the_most_severe(config: Path, overrides: list[str], status: int, codes: list[str]) -> None:
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
    (tmp_path / "conf" / "plan").mkdir(parents=True)
    (tmp_path / "conf" / "plan" / "ours.yaml").write_text("defaults: [fp16_true]\n")
    (tmp_path / "beside.py").write_text("from support.hf import gpt2 as net\n")
    path = tmp_path / "run.yaml"
    path.write_text("defaults: [{plan: fp32}, {strategy: fsdp2}, _self_]\nmodel: {_target_: beside.net}\n")
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    assert _run(path).output == HEALTHY_OUTPUT
    assert "LMP001" in _run(path, "plan=ours", "--config-dir", tmp_path / "conf").stdout
    assert "Could not find 'plan/ours'" in _refusal(path, "plan=ours")
    assert _run("experiment=llama_tiny", "plan=fp16").output == HEALTHY_OUTPUT


def test_what_is_wrong_is_named_together_one_fault_a_line(config: Path) -> None:
    title, *faults = _refusal(
        config, "plan.precision=bf17-mixed", "plan.oops=1", "model._target_=support.nowhere"
    ).splitlines()
    assert title == "lightning-mp doctor: 3 errors"
    for said in ("'bf17-mixed'", "unknown key oops", "support.nowhere"):
        assert sum(said in line for line in faults) == 1
    assert "t4-16" in _refusal(config, "--gpu=t4")
