"""``lightning-mp audit``, ``pins`` and ``env``: what is printed and written, with an exit status for scripts."""

import json
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from lightning_mp.cli import app
from lightning_mp.cli.examine import collect
from lightning_mp.numerics import dtypes as devices
from lightning_mp.policy import PRECISIONS
from lightning_mp.policy.hardware import Device
from support.training import write

SMALL = ("trainer.accelerator=cpu", "callbacks=none", "data.val_batches=1")


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("audit",), "without a run"),
        (("audit", "experiment=llama_tiny", "--steps", "0"), "--steps=0"),
        (("audit", "experiment=llama_tiny", "plan=fp32", "trainer.devices=999"), "trainer.devices=999, processes on"),
        (("audit", "missing.yaml"), "which is no file"),
        (("pins", "model=gpt2_tiny", "plan=null"), "section 'plan'"),
    ],
)
def test_bad_input_is_status_2_and_one_message(arguments: tuple[str, ...], says: str) -> None:
    result = _run(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_as_declared_is_status_0_a_table_and_its_files(tmp_path: Path) -> None:
    result = _run("audit", "experiment=llama_tiny", "plan=bf16", *SMALL, f"run_dir={tmp_path}")
    assert result.exit_code == 0, result.output
    assert "all as declared by MixedPrecisionPlan" in result.stdout
    assert "lm_head" in result.stdout
    written = json.loads((tmp_path / "audit.json").read_text())
    assert written["ok"]
    assert written["rows"]
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
    write(tmp_path, _UNFAITHFUL, "unfaithful.py")
    path = write(tmp_path, _RUN)
    result = _run("audit", path, *SMALL, f"run_dir={tmp_path / 'run'}")
    assert result.exit_code == 1, result.output
    assert "not as declared" in result.stdout
    as_json = _run("audit", path, *SMALL, f"run_dir={tmp_path / 'json'}", "--json")
    assert as_json.exit_code == 1
    assert not json.loads(as_json.stdout)["ok"]
    assert not json.loads((tmp_path / "run" / "audit.json").read_text())["ok"]


RUN_OF_A_NORM = """\
plan: 16-mixed
model: {_target_: test_pin_advice.Normed}
data: {_target_: torch.utils.data.DataLoader, dataset: {_target_: test_pin_advice._batches}, batch_size: null}
trainer: {accelerator: cpu, devices: 1, max_steps: 3, logger: false}
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_needs_no_pins_says_so_and_writes_nothing(as_json: bool, tmp_path: Path) -> None:
    run = ("experiment=llama_tiny", "plan=bf16", *SMALL[:2], "--steps", "1", f"run_dir={tmp_path / 'run'}")
    result = _run("pins", *run, *["--json"] * as_json)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"pins": {}, "rows": []} if as_json else "No pins: under bf16" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_what_is_suggested_is_confirmed_when_asked(tmp_path: Path) -> None:
    result = _run("pins", write(tmp_path, RUN_OF_A_NORM), "--confirm", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["pins"], found["confirmed"]) == ({"norm": "fp32"}, True)


T4 = Device("cuda", "Tesla T4", (7, 5), "none", 16 * 2**30)
OLD_CPU = Device("cpu", "CPU", None, "emulated")


def test_env_prints_one_json_object_with_what_is_installed() -> None:
    found = json.loads(_run("env", "--json").output)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["lightning"] == version("lightning")
    assert found["versions"]["python"] == platform.python_version()
    assert found["devices"][-1]["device"] == "cpu"
    assert found == collect()


def test_env_says_of_each_extra_whether_it_is_installed() -> None:
    lines = dict(line.split(maxsplit=1) for line in _run("env").output.partition("\n\n")[0].splitlines())
    for package in ("transformers", "peft", "deepspeed", "torchao", "hydra-core"):
        said = version(package) if find_spec(package.replace("-core", "")) else "not installed"
        assert lines[package] == said


def test_every_mode_has_its_line_on_every_device() -> None:
    lines = _run("env").output.splitlines()
    for mode in PRECISIONS:
        assert sum(line.startswith(f"  {mode}") for line in lines) == len(collect()["devices"])


@pytest.mark.parametrize(
    ("device", "mode", "says"),
    [
        (T4, "16-mixed", "runs"),
        (T4, "bf16-mixed", "refused: use '16-mixed'"),
        (T4, "tf32='high'", "changes nothing: the device has no TF32"),
        (T4, "auto", "16-mixed from 100M parameters on: Tesla T4 has no native bf16: fp16 with loss scaling"),
        (Device("cuda", "A100", (8, 0)), "tf32='high'", "runs"),
        (Device("cuda", "M60", (5, 2), "none"), "16-mixed", "refused: use '32-true'"),
        (OLD_CPU, "bf16-mixed", "runs, emulated: right, but no faster than fp32"),
        (OLD_CPU, "fp8-mixed", "runs, for checking and not for speed"),
    ],
)
def test_a_mode_runs_or_is_refused(monkeypatch: pytest.MonkeyPatch, device: Device, mode: str, says: str) -> None:
    monkeypatch.setattr(devices, "describe", lambda _: device)
    assert collect()["devices"][-1]["modes"][mode] == says
