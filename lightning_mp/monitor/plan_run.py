"""What a plan does around a fit besides its steps: it says what it will do, has the doctor look, and guards the run."""

from __future__ import annotations

from torch import nn

from lightning_mp.compat.lightning import Trainer
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.plan_base import PlanBase, began
from lightning_mp.errors import Faults
from lightning_mp.monitor.doctor import warn_at_fit
from lightning_mp.monitor.nonfinite.plan_guard import PlanGuard


class PlanRun:
    """One fit under a plan."""

    def __init__(self, plan: PlanBase, trainer: Trainer, faults: Faults) -> None:
        self._plan, self._trainer = plan, trainer
        self._guard = PlanGuard(plan, trainer) if plan.policy.nonfinite.watches else None
        if self._guard is not None:
            self._guard.check(faults)

    def begin(self, module: nn.Module, engine: StepEngine) -> None:
        """The module is about to be changed: warn of what can be seen, tell people and loggers."""
        if self._guard is not None:
            self._guard.install()
        warn_at_fit(module, self._plan.policy)
        began(engine, module, self._trainer)

    def end(self) -> None:
        """Undo it."""
        if self._guard is not None:
            self._guard.remove()
