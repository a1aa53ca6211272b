"""Callbacks for existing projects on Lightning's own precision plugins and strategies; each works alone."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_mp.bad_steps.guard import NonFiniteGuard
    from lightning_mp.bad_steps.handler import replay_saved
    from lightning_mp.health.callback import TrainingHealth
    from lightning_mp.health.loss_scale_monitor import LossScaleMonitor
    from lightning_mp.plan.acting import ActivationCheckpointing, DtypePinning, EnableTF32
    from lightning_mp.precision_audit.audit import PrecisionAudit

_HOMES = {
    "ActivationCheckpointing": "plan.acting",
    "DtypePinning": "plan.acting",
    "EnableTF32": "plan.acting",
    "LossScaleMonitor": "health.loss_scale_monitor",
    "NonFiniteGuard": "bad_steps.guard",
    "PrecisionAudit": "precision_audit.audit",
    "TrainingHealth": "health.callback",
    "replay_saved": "bad_steps.handler",
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
    value = getattr(import_module(f"lightning_mp.{_HOMES[name]}"), name)
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
