"""The facts about a device, and TF32: set whatever was set before, and given back exactly."""

import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_mp.numerics.dtypes import describe, set_tf32, tf32_refusal
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.numerics.rng import rng_state, set_rng_state
from lightning_mp.policy import hardware
from support.tf32 import BACKENDS, SWITCHES, readings


def test_a_cpu() -> None:
    found = describe(torch.device("cpu"))
    native = "native" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "emulated"
    assert found == hardware.Device("cpu", "CPU", None, native, None)
    assert not found.tf32
    for mode in ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        assert hardware.refusal(found, mode) is None


def test_a_device_nobody_knows_is_refused() -> None:
    found = describe(torch.device("meta"))
    assert found.type == "meta"
    assert hardware.refusal(found, "32-true") is not None


def _old(matmul: str | None = None, cudnn: bool | None = None) -> None:
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if cudnn is not None:
        BACKENDS.cudnn.allow_tf32 = cudnn


def _new(**values: str) -> None:
    for name, value in values.items():
        SWITCHES[name.replace("_", ".")].fp32_precision = value


#: what a process may have set: by the older calls, or by newer switches that agree with them
BEFORE: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "high": lambda: _old("high"),
    "allow_tf32": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "cudnn off": lambda: _old(cudnn=False),
    "cudnn off, high": lambda: _old("high", cudnn=False),
    "cudnn off, both ieee": lambda: (_old(cudnn=False), _new(cudnn_conv="ieee", cudnn_rnn="ieee")),
    "matmul ieee": lambda: _new(cuda_matmul="ieee"),
    "both tf32": lambda: _new(cudnn_conv="tf32", cudnn_rnn="tf32"),
    "oneDNN ieee": lambda: _new(mkldnn_matmul="ieee"),
}
#: what the older calls cannot say, or a wider switch, which TF32 may follow or not
UNSETTABLE: dict[str, Callable[[], object]] = {
    "matmul tf32": lambda: _new(cuda_matmul="tf32"),
    "high, then matmul ieee": lambda: (_old("high"), _new(cuda_matmul="ieee")),
    "everything tf32": lambda: _new(generic="tf32"),
    "cudnn tf32": lambda: _new(cudnn="tf32"),
    "cudnn tf32, high": lambda: (_old("high"), _new(cudnn="tf32")),
    "convolutions ieee": lambda: _new(cudnn_conv="ieee"),
    "oneDNN bf16": lambda: _new(mkldnn_matmul="bf16"),
}
SETTINGS = ("highest", "high", "medium")


def _around(before: str, *settings: str) -> list[dict[str, object]]:
    BEFORE[before]()
    found, restores = [readings()], list[Callable[[], None]]()
    for setting in settings:
        restores.append(set_tf32(setting))
        found.append(readings())
    for restore in reversed(restores):
        restore()
        found.append(readings())
    with BACKENDS.cudnn.flags():  # raises where the switches disagree
        return found


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("before", BEFORE)
def test_tf32_is_set_readable_meanwhile_and_put_back(before: str, setting: str, pristine: Callable[..., Any]) -> None:
    found, within, after = pristine(_around, before, setting)
    allowed = setting != "highest"
    assert within["float32_matmul_precision"] == setting
    assert within["cuda.matmul.allow_tf32"] is within["cudnn.allow_tf32"] is allowed
    effective = {within[name] for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")}
    assert effective == {"tf32"} if allowed else effective <= {"ieee", "none"}
    assert after == found
    assert "refuses to be read" not in {*map(str, found.values())}


def _refusal(before: str) -> tuple[str, str] | None:
    (BEFORE | UNSETTABLE)[before]()
    return tf32_refusal()


@pytest.mark.parametrize("before", BEFORE | UNSETTABLE)
def test_what_the_newer_switches_say_alone_is_refused(before: str, pristine: Callable[..., Any]) -> None:
    assert (pristine(_refusal, before) is not None) is (before in UNSETTABLE)


MIB = 2**20
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_the_most_that_was_held_at_once_exactly(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    kept = torch.ones(32 * MIB // 4, device=device)

    with PeakMemory(device) as peak:
        for size in (16, 64, 8):
            block = torch.empty(size * MIB, dtype=torch.uint8, device=device)
            del block
        both = [torch.empty(20 * MIB, dtype=torch.uint8, device=device) for _ in range(2)]
        both.clear()
    assert peak.bytes == 64 * MIB
    assert kept.numel() == 8 * MIB


CPU = torch.device("cpu")


def _draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.random(), np.random.normal()]


@pytest.mark.parametrize("drawn", range(4))
def test_the_same_numbers_come_again(drawn: int) -> None:
    """Wherever the generators stand: a normal number is drawn in pairs, of which one is kept."""
    for _ in range(drawn):
        random.gauss(0, 1)
        np.random.normal()
    state = rng_state(CPU)
    first = [_draw() for _ in range(3)]
    set_rng_state(state, CPU)
    assert [_draw() for _ in range(3)] == first


def test_it_survives_a_file_that_holds_plain_values_only() -> None:
    state, file = rng_state(CPU), io.BytesIO()
    first = _draw()
    torch.save(state, file)
    file.seek(0)
    set_rng_state(torch.load(file, weights_only=True), CPU)
    assert _draw() == first
