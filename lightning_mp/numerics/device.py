"""The device: what the rules of ``hardware`` need to know of it, and TF32, set together and given back as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from lightning_mp.compat import torch as compat
from lightning_mp.policy.hardware import Device

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
    switches = _switches()
    before = _own_values(switches)
    matmul, cudnn = _matmul_precision(), _cudnn_allow_tf32()

    def restore() -> None:
        torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            torch.backends.cudnn.allow_tf32 = cudnn
        for name, switch in switches.items():
            switch.fp32_precision = before[name]

    torch.set_float32_matmul_precision(setting)
    torch.backends.cudnn.allow_tf32 = setting != "highest"
    for name in ("cudnn.conv", "cudnn.rnn"):
        if name in switches:  # "not allowed" by the older call only means that a wider switch decides
            switches[name].fp32_precision = "ieee" if setting == "highest" else "tf32"
    return restore


def _switches() -> dict[str, Any]:
    """The per-operation switches of torch 2.9 and newer, which the two older calls move along with themselves."""
    switches: dict[str, Any] = {
        "cuda.matmul": torch.backends.cuda.matmul,
        "mkldnn.matmul": getattr(torch.backends.mkldnn, "matmul", None),
        "cudnn.conv": getattr(torch.backends.cudnn, "conv", None),
        "cudnn.rnn": getattr(torch.backends.cudnn, "rnn", None),
    }
    return {name: switch for name, switch in switches.items() if hasattr(switch, "fp32_precision")}


def _own_values(switches: dict[str, Any]) -> dict[str, str]:
    """What each switch was set to itself: ``"none"`` where it follows a wider one.

    A switch only tells what is in force. To tell its own value from an inherited one, the wider switches (all
    backends, then all of CUDA) are moved for a moment.
    """
    if not switches:
        return {}
    everything: Any = torch.backends
    cuda: Any = torch.backends.cudnn
    follow_everything = _followers(everything, {**switches, "cuda": cuda}, everything.fp32_precision)
    cuda_own = "none" if "cuda" in follow_everything else cuda.fp32_precision
    follow = follow_everything | _followers(cuda, switches, cuda_own)
    return {name: "none" if name in follow else switch.fp32_precision for name, switch in switches.items()}


def _followers(wider: Any, switches: dict[str, Any], own: str) -> set[str]:
    seen: list[dict[str, str]] = []
    try:
        for value in ("ieee", "tf32"):
            wider.fp32_precision = value
            seen.append({name: switch.fp32_precision for name, switch in switches.items()})
    finally:
        wider.fp32_precision = own
    return {name for name in switches if seen[0][name] != seen[1][name]}


def _matmul_precision() -> str:
    """``torch.get_float32_matmul_precision()``, also where it raises because the newer switch disagrees."""
    with contextlib.suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    switch: Any = torch.backends.cuda.matmul
    current = switch.fp32_precision
    try:
        # The older value is one of two kinds; reading it needs the newer switch to agree with it for a moment.
        for agreeing in ("ieee", "tf32"):
            switch.fp32_precision = agreeing
            with contextlib.suppress(RuntimeError):
                return torch.get_float32_matmul_precision()
        return "highest"
    finally:
        switch.fp32_precision = current


def _cudnn_allow_tf32() -> bool | None:
    """``torch.backends.cudnn.allow_tf32``, or ``None`` where the newer switches disagree and it cannot be read."""
    try:
        return torch.backends.cudnn.allow_tf32
    except RuntimeError:
        return None
