"""What monitors may read of a ``MixedPrecisionPlan``, which lives on a floor above theirs."""

from __future__ import annotations

from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepLedger
from lightning_mp.policy import PrecisionPolicy


class PlanBase:
    """The base class by which a precision plugin is known to be a plan."""

    policy: PrecisionPolicy
    #: counts of applied and skipped steps
    ledger: StepLedger
    #: ``None`` in a mode without loss scaling
    scaler: LossScaler | None
