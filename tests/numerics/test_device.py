"""The facts about a device, and TF32: set whatever was set before, and given back exactly."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_mp.numerics.dtypes import describe, has_tf32, set_tf32, tf32_refusal
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


@pytest.mark.parametrize("current", [0, 1])
def test_the_device_that_is_described_is_asked_not_the_current_one(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SimpleNamespace(name=str(major), major=major, minor=0, total_memory=1) for major in (8, 7)]
    at = [current]

    def properties(device: torch.device | int) -> SimpleNamespace:
        return gpus[device if isinstance(device, int) else device.index]

    def exchange(index: int) -> int:
        before, at[0] = at[0], index
        return before

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: at[0])
    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_check_bf16_tensor_supported", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    assert [describe(torch.device("cuda", index)).bf16 for index in (0, 1)] == ["native", "emulated"]
    assert at == [current]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu() -> None:
    found = describe(torch.device("cuda", 0))
    assert found.type == "cuda"
    assert found.name == torch.cuda.get_device_name(0)
    assert found.capability == torch.cuda.get_device_capability(0)
    assert found.memory == torch.cuda.get_device_properties(0).total_memory
    assert (found.bf16 == "native") == (found.capability >= (8, 0))


# ---------------------------------------------------------------------- TF32


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
    "highest": lambda: _old("highest"),
    "high": lambda: _old("high"),
    "medium": lambda: _old("medium"),
    "allow_tf32": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "cudnn on": lambda: _old(cudnn=True),
    "cudnn off": lambda: _old(cudnn=False),
    "cudnn off, high": lambda: _old("high", cudnn=False),
    "cudnn off, both ieee": lambda: (_old(cudnn=False), _new(cudnn_conv="ieee", cudnn_rnn="ieee")),
    "matmul ieee": lambda: _new(cuda_matmul="ieee"),
    "both tf32": lambda: _new(cudnn_conv="tf32", cudnn_rnn="tf32"),
    "oneDNN ieee": lambda: _new(mkldnn_matmul="ieee"),
    "oneDNN convolutions bf16": lambda: _new(mkldnn_conv="bf16"),
}
#: what the older calls cannot say, or a wider switch, which TF32 may follow or not
UNSETTABLE: dict[str, Callable[[], object]] = {
    "matmul tf32": lambda: _new(cuda_matmul="tf32"),
    "high, then matmul ieee": lambda: (_old("high"), _new(cuda_matmul="ieee")),
    "everything tf32": lambda: _new(generic="tf32"),
    "everything ieee": lambda: _new(generic="ieee"),
    "cudnn tf32": lambda: _new(cudnn="tf32"),
    "cudnn ieee": lambda: _new(cudnn="ieee"),
    "cudnn tf32, high": lambda: (_old("high"), _new(cudnn="tf32")),
    "convolutions ieee": lambda: _new(cudnn_conv="ieee"),
    "recurrent ieee": lambda: _new(cudnn_rnn="ieee"),
    "oneDNN bf16": lambda: _new(mkldnn_matmul="bf16"),
}
SETTINGS = ("highest", "high", "medium")


def _around(before: str, *settings: str) -> list[dict[str, object]]:
    """The readings before, within each of the settings, one in the other, and after."""
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


@pytest.mark.parametrize("inner", SETTINGS)
@pytest.mark.parametrize("outer", SETTINGS)
def test_settings_nest(outer: str, inner: str, pristine: Callable[..., Any]) -> None:
    before, within_outer, _, back_in_outer, after = pristine(_around, "nothing", outer, inner)
    assert back_in_outer == within_outer
    assert after == before


def _refusal(before: str) -> tuple[str, str] | None:
    (BEFORE | UNSETTABLE)[before]()
    return tf32_refusal()


@pytest.mark.parametrize("before", BEFORE | UNSETTABLE)
def test_what_the_newer_switches_say_alone_is_refused(before: str, pristine: Callable[..., Any]) -> None:
    assert (pristine(_refusal, before) is not None) is (before in UNSETTABLE)


def _followed(setting: str | None) -> dict[str, object]:
    if setting is not None:
        set_tf32(setting)()
    _new(generic="ieee")
    return readings()


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_what_follows_the_wider_switch_follows_it_after_tf32(setting: str, pristine: Callable[..., Any]) -> None:
    """No reading shows it at once. After "highest" convolutions keep the value that torch's own setter writes."""
    assert pristine(_followed, setting) == pristine(_followed, None)


@pytest.mark.parametrize("device", ["cpu", "meta", "mps"])
def test_only_cuda_has_tf32(device: str) -> None:
    assert has_tf32(torch.device(device)) is False


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ampere_and_newer_have_tf32() -> None:
    assert has_tf32(torch.device("cuda", 0)) is (torch.cuda.get_device_capability(0) >= (8, 0))
