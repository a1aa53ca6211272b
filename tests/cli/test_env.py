"""``lightning-mp env``: what is said of a mode on a device is what a plan does there."""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lightning_mp.cli import app
from lightning_mp.cli.examine import collect
from lightning_mp.numerics import dtypes as devices
from lightning_mp.policy import PRECISIONS
from lightning_mp.policy.hardware import Device

T4 = Device("cuda", "Tesla T4", (7, 5), "none", 16 * 2**30)
P40 = Device("cuda", "Tesla P40", (6, 1), "emulated")
OLD_CPU = Device("cpu", "CPU", None, "emulated")


def _modes(monkeypatch: pytest.MonkeyPatch, device: Device) -> dict[str, Any]:
    monkeypatch.setattr(devices, "describe", lambda _: device)
    return collect()["devices"][-1]["modes"]


def test_it_prints_one_json_object_with_what_is_installed() -> None:
    found = json.loads(CliRunner().invoke(app, ["env", "--json"]).output)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["lightning"] == version("lightning")
    assert found["versions"]["python"] == platform.python_version()
    assert found["devices"][-1]["device"] == "cpu"
    assert found == collect()


def test_every_mode_has_its_line_on_every_device() -> None:
    lines = CliRunner().invoke(app, ["env"]).output.splitlines()
    for mode in PRECISIONS:
        assert sum(line.startswith(f"  {mode}") for line in lines) == len(collect()["devices"])


@pytest.mark.parametrize(
    ("device", "mode", "says"),
    [
        (T4, "16-mixed", "runs"),
        (T4, "bf16-mixed", "refused: use '16-mixed'"),
        (T4, "tf32='high'", "changes nothing: the device has no TF32"),
        (T4, "auto", "16-mixed from 100M parameters on: Tesla T4 has no native bf16: fp16 with loss scaling"),
        (P40, "bf16-true", "runs, emulated: right, but no faster than fp32"),
        (Device("cuda", "A100", (8, 0)), "tf32='high'", "runs"),
        (Device("cuda", "M60", (5, 2), "none"), "16-mixed", "refused: use '32-true'"),
        (OLD_CPU, "bf16-mixed", "runs, emulated: right, but no faster than fp32"),
        (OLD_CPU, "32-true", "runs"),
        (OLD_CPU, "fp8-mixed", "runs, for checking and not for speed"),
    ],
)
def test_a_mode_runs_is_emulated_or_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: Device, mode: str, says: str
) -> None:
    assert _modes(monkeypatch, device)[mode] == says
