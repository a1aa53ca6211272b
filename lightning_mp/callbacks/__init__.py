"""Callbacks for existing projects on Lightning's own precision plugins and strategies; each works alone."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_mp.callbacks.acting import ActivationCheckpointing, DtypePinning, EnableTF32
    from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor
    from lightning_mp.callbacks.nonfinite_guard import NonFiniteGuard
    from lightning_mp.callbacks.precision_audit import PrecisionAudit
    from lightning_mp.callbacks.training_health import TrainingHealth
    from lightning_mp.monitor.nonfinite.bad_steps import replay_saved

_HOMES = {
    "ActivationCheckpointing": "callbacks.acting",
    "DtypePinning": "callbacks.acting",
    "EnableTF32": "callbacks.acting",
    "LossScaleMonitor": "callbacks.loss_scale_monitor",
    "NonFiniteGuard": "callbacks.nonfinite_guard",
    "PrecisionAudit": "callbacks.precision_audit",
    "TrainingHealth": "callbacks.training_health",
    "replay_saved": "monitor.nonfinite.bad_steps",
}

__all__ = [
    "ActivationCheckpointing",
    "DtypePinning",
    "EnableTF32",
    "LossScaleMonitor",
    "NonFiniteGuard",
    "PrecisionAudit",
    "TrainingHealth",
    "replay_saved",
]


def __getattr__(name: str) -> Any:
    """Import a callback on first use, made for the copy of Lightning that the program imports."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import_module("lightning_mp.strategies.registry").register()
    return getattr(import_module(f"lightning_mp.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
