"""The device: what the rules of ``hardware`` need to know of it, and TF32, set together and given back as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_mp.compat import torch as compat
from lightning_mp.policy.hardware import Device

T = TypeVar("T")
Restore = Callable[[], None]


def describe(device: torch.device) -> Device:
    """The facts about ``device`` that decide which precision it can run."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        emulated = torch.cuda.is_bf16_supported(including_emulation=True)
        bf16 = "native" if native else "emulated" if emulated else "none"
        return Device("cuda", properties.name, (properties.major, properties.minor), bf16, properties.total_memory)
    if device.type == "mps":
        return Device("mps", "Apple GPU", None, "native" if torch.backends.mps.is_macos_or_newer(14, 0) else "none")
    if device.type == "cpu":
        return Device("cpu", "CPU", None, "native" if compat.cpu_has(torch.bfloat16) else "emulated")
    return Device(device.type, device.type, None, "none")


# ------------------------------------------------------------------ TF32


def has_tf32(device: torch.device) -> bool:
    """Whether products on ``device`` can run in TF32: CUDA with compute capability 8.0 (Ampere) or newer."""
    return device.type == "cuda" and describe(device).tf32


def set_tf32(setting: str) -> Restore:
    """Set matmul (``"highest"``, ``"high"`` or ``"medium"``) and cuDNN precision; calling the result undoes it.

    ``"highest"`` is IEEE fp32 for both; the others allow TF32 for both. ``torch.get_float32_matmul_precision()`` is
    always readable meanwhile: it raises where only the newer per-backend switch was set, which this never does.
    """
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, *_cudnn(), getattr(torch.backends.mkldnn, "matmul"))  # noqa: B009
    before = [switch.fp32_precision for switch in switches]
    matmul, allowed = _readable(torch.get_float32_matmul_precision), _readable(lambda: torch.backends.cudnn.allow_tf32)

    def restore() -> None:
        torch.set_float32_matmul_precision(matmul or "highest")
        if allowed is not None:
            torch.backends.cudnn.allow_tf32 = allowed
        for switch, value in zip(switches, before, strict=True):
            switch.fp32_precision = value

    torch.set_float32_matmul_precision(setting)
    torch.backends.cudnn.allow_tf32 = setting != "highest"
    for switch in _cudnn():  # "not allowed" by the older call only means that a wider switch decides
        switch.fp32_precision = "ieee" if setting == "highest" else "tf32"
    return restore


def _cudnn() -> tuple[Any, Any]:
    cudnn: Any = torch.backends.cudnn
    return cudnn.conv, cudnn.rnn


def _readable(read: Callable[[], T]) -> T | None:
    """What one of the older calls says; torch raises where only the newer switches were set."""
    try:
        return read()
    except RuntimeError:
        return None
