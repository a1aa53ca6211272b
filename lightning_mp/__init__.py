"""Write down once which numbers live in which format; that is what runs, or the run refuses and says why."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_mp.checkpoints import consolidate
    from lightning_mp.comparison.compare import compare
    from lightning_mp.comparison.results import Comparison
    from lightning_mp.differences import first_difference
    from lightning_mp.errors import LossScaleError, MissingExtraError, NonFiniteError, PlanError
    from lightning_mp.modules.fp8 import FP8Layer
    from lightning_mp.modules.pins import unpin
    from lightning_mp.pin_advice import PinAdvice, suggest_pins
    from lightning_mp.plan.plan import MixedPrecisionPlan
    from lightning_mp.policy import FP8, Checkpointing, NonFinite, Pin, PrecisionPolicy
    from lightning_mp.policy.pieces import LossScaling
    from lightning_mp.precision_audit.audit import AuditReport, audit
    from lightning_mp.preflight.doctor import doctor
    from lightning_mp.record.events import Event
    from lightning_mp.record.findings import Finding
    from lightning_mp.strategies.factory import make_strategy, register_plan, trainer_kwargs

__version__ = "0.1.0"

#: the modules of public names
_HOMES = {
    "checkpoints": ("consolidate",),
    "comparison.compare": ("compare",),
    "comparison.results": ("Comparison",),
    "differences": ("first_difference",),
    "errors": ("LossScaleError", "MissingExtraError", "NonFiniteError", "PlanError"),
    "modules.fp8": ("FP8Layer",),
    "modules.pins": ("unpin",),
    "precision_audit.audit": ("AuditReport", "audit"),
    "preflight.doctor": ("doctor",),
    "record.events": ("Event",),
    "record.findings": ("Finding",),
    "pin_advice": ("PinAdvice", "suggest_pins"),
    "policy": ("FP8", "Checkpointing", "LossScaling", "NonFinite", "Pin", "PrecisionPolicy"),
    "plan.plan": ("MixedPrecisionPlan",),
    "strategies.factory": ("make_strategy", "register_plan", "trainer_kwargs"),
}

__all__ = [
    "FP8",
    "AuditReport",
    "Checkpointing",
    "Comparison",
    "Event",
    "FP8Layer",
    "Finding",
    "LossScaleError",
    "LossScaling",
    "MissingExtraError",
    "MixedPrecisionPlan",
    "NonFinite",
    "NonFiniteError",
    "Pin",
    "PinAdvice",
    "PlanError",
    "PrecisionPolicy",
    "audit",
    "compare",
    "consolidate",
    "doctor",
    "first_difference",
    "make_strategy",
    "register_plan",
    "suggest_pins",
    "trainer_kwargs",
    "unpin",
]

#: public packages: ``lightning_mp.callbacks.TrainingHealth`` needs no import of its own
_PACKAGES = ("callbacks", "numerics", "planner")

#: those whose names neither are made of Lightning's classes nor ask for them
_APART = ("checkpoints", "errors", "modules.fp8", "modules.pins", "policy", "record.events", "record.findings")


def __getattr__(name: str) -> Any:
    """Import a public name on first use: ``import lightning_mp`` alone imports neither torch nor Lightning.

    The first use of a name that needs Lightning also registers the ``mp_*`` strategies with it.
    """
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    if home not in _APART:
        import_module(f"{__name__}.strategies.registry").register()
    globals()[name] = value  # the next use does not come here
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
