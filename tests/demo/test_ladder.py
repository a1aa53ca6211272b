"""How long the default demo is: the device's number of steps, or fewer on a machine too slow for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from demo.tiny import SHAPE, corpus
from lightning_mp.demo import ladder
from lightning_mp.demo.ladder import MIN_STEPS, Setting, affordable_steps
from lightning_mp.demo.modes import parse_modes
from lightning_mp.demo.shapes import Device
from lightning_mp.demo.text import Text
from lightning_mp.demo.worker import Processes

CPU = Device("cpu", "a CPU", threads=1)


def _setting(device: Device, folder: Path, steps: int = 50) -> Setting:
    return Setting(device, replace(SHAPE, steps=steps), steps, Text(("text",), "a test"), corpus(), folder)


@pytest.mark.parametrize(("seconds", "steps"), [(1e6, 50), (1e-6, MIN_STEPS)], ids=["fast", "slow"])
def test_steps_are_as_many_as_the_time_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
) -> None:
    monkeypatch.setattr(ladder, "BUDGET", seconds)
    modes = parse_modes("fp32,tf32,bf16")
    assert affordable_steps(modes, _setting(CPU, tmp_path), Processes()) == steps
    assert list(tmp_path.iterdir()) == []  # timing writes nothing where results go


def test_a_default_below_the_least_is_not_raised_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "BUDGET", 1e-6)
    assert affordable_steps(parse_modes("fp32"), _setting(CPU, tmp_path, steps=3), Processes()) == 3


def test_a_gpu_is_not_timed(tmp_path: Path) -> None:
    gpu = Device("cuda", "a GPU", (9, 0), 80 * 2**30)
    assert affordable_steps(parse_modes("fp32"), _setting(gpu, tmp_path), Processes()) == 50
