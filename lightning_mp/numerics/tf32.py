"""TF32 for matrix products and cuDNN: set together, and given back exactly as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

Restore = Callable[[], None]


def has_tf32(device: torch.device) -> bool:
    """Whether products on ``device`` can run in TF32: CUDA with compute capability 8.0 (Ampere) or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def set_tf32(setting: str) -> Restore:
    """Set matmul (``"highest"``, ``"high"`` or ``"medium"``) and cuDNN precision; calling the result undoes it.

    ``"highest"`` is IEEE fp32 for both; the others allow TF32 for both. ``torch.get_float32_matmul_precision()`` is
    always readable meanwhile: it raises where only the newer per-backend switch was set, which this never does.
    """
    switches = _switches()
    before = {name: getattr(owner, attribute) for name, (owner, attribute) in switches.items()}
    matmul, cudnn = _matmul_precision(), _cudnn_allow_tf32()

    def restore() -> None:
        torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            torch.backends.cudnn.allow_tf32 = cudnn
        for name, (owner, attribute) in switches.items():
            if getattr(owner, attribute) != before[name]:
                setattr(owner, attribute, before[name])

    torch.set_float32_matmul_precision(setting)
    torch.backends.cudnn.allow_tf32 = setting != "highest"
    return restore


def _switches() -> dict[str, tuple[Any, str]]:
    """The per-backend switches of torch 2.9 and newer that the older two calls move along with themselves."""
    owners: dict[str, Any] = {
        "cuda.matmul": torch.backends.cuda.matmul,
        "mkldnn.matmul": getattr(torch.backends.mkldnn, "matmul", None),
        "cudnn.conv": getattr(torch.backends.cudnn, "conv", None),
        "cudnn.rnn": getattr(torch.backends.cudnn, "rnn", None),
    }
    return {name: (owner, "fp32_precision") for name, owner in owners.items() if hasattr(owner, "fp32_precision")}


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
