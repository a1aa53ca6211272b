"""Write down once which numbers live in which format; that is what runs, or the run refuses and says why."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_mp.registering import register_with_lightning

if TYPE_CHECKING:
    from lightning_mp.assemble import make_strategy, trainer_kwargs
    from lightning_mp.auditing import AuditReport, audit
    from lightning_mp.checkpoints import consolidate
    from lightning_mp.errors import LossScaleError, MissingExtraError, NonFiniteError, PlanError
    from lightning_mp.events import Event
    from lightning_mp.findings import Finding
    from lightning_mp.loss_scaling import LossScaling
    from lightning_mp.numerics.pins import unpin
    from lightning_mp.policy import Checkpointing, NonFinite, Pin, PrecisionPolicy
    from lightning_mp.precision import MixedPrecisionPlan
    from lightning_mp.preflight import doctor

__version__ = "0.1.0"

_HOMES = {
    "AuditReport": "auditing",
    "Checkpointing": "policy",
    "Event": "events",
    "Finding": "findings",
    "LossScaleError": "errors",
    "LossScaling": "loss_scaling",
    "MissingExtraError": "errors",
    "MixedPrecisionPlan": "precision",
    "NonFinite": "policy",
    "NonFiniteError": "errors",
    "Pin": "policy",
    "PlanError": "errors",
    "PrecisionPolicy": "policy",
    "audit": "auditing",
    "consolidate": "checkpoints",
    "doctor": "preflight",
    "make_strategy": "assemble",
    "trainer_kwargs": "assemble",
    "unpin": "numerics.pins",
}

__all__ = [
    "AuditReport",
    "Checkpointing",
    "Event",
    "Finding",
    "LossScaleError",
    "LossScaling",
    "MissingExtraError",
    "MixedPrecisionPlan",
    "NonFinite",
    "NonFiniteError",
    "Pin",
    "PlanError",
    "PrecisionPolicy",
    "audit",
    "consolidate",
    "doctor",
    "make_strategy",
    "trainer_kwargs",
    "unpin",
]

register_with_lightning()


def __getattr__(name: str) -> Any:
    """Import a public name on first use: ``import lightning_mp`` alone imports neither torch nor Lightning."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
