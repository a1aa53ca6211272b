"""Callbacks for existing projects on Lightning's own precision plugins and strategies; each works alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_mp.compat.deferred import fetch

if TYPE_CHECKING:
    from lightning_mp.callbacks.activation_checkpointing import ActivationCheckpointing
    from lightning_mp.callbacks.dtype_pinning import DtypePinning
    from lightning_mp.callbacks.enable_tf32 import EnableTF32
    from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor
    from lightning_mp.callbacks.nonfinite_guard import NonFiniteGuard
    from lightning_mp.callbacks.precision_audit import PrecisionAudit
    from lightning_mp.callbacks.training_health import TrainingHealth

_HOMES = {
    "ActivationCheckpointing": "activation_checkpointing",
    "DtypePinning": "dtype_pinning",
    "EnableTF32": "enable_tf32",
    "LossScaleMonitor": "loss_scale_monitor",
    "NonFiniteGuard": "nonfinite_guard",
    "PrecisionAudit": "precision_audit",
    "TrainingHealth": "training_health",
}

__all__ = [
    "ActivationCheckpointing",
    "DtypePinning",
    "EnableTF32",
    "LossScaleMonitor",
    "NonFiniteGuard",
    "PrecisionAudit",
    "TrainingHealth",
]


def __getattr__(name: str) -> Any:
    """Import a callback on first use, made for the copy of Lightning that the program imports."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return fetch(f"{__name__}.{_HOMES[name]}", name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
