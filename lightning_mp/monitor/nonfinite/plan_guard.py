"""What a plan does around a fit besides its steps: it says what it will do, has the doctor look, guards the run."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.diagnosis import Verdict
from lightning_mp.engines.plan_base import PlanBase, began
from lightning_mp.errors import Faults
from lightning_mp.monitor.callback_utils import StepTracker, callbacks_of
from lightning_mp.monitor.doctor import warn_at_fit
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.nonfinite.bad_steps import BadSteps, check_rewind
from lightning_mp.monitor.nonfinite.events import is_ordinary
from lightning_mp.monitor.run_log import WritesRun

_WRITER = "MixedPrecisionPlan"


class PlanGuard(WritesRun):
    """Added by a plan to the callbacks of a fit, before all others, and taken out with :meth:`remove`.

    The engine decides and skips. Where it would raise it leaves its verdict here, and the batch, which is still at hand
    at its end, is run again, saved and written down; then the run is rewound, or ended with the error that the engine
    would raise.
    """

    def __init__(self, plan: PlanBase, trainer: Trainer) -> None:
        self._plan, self._trainer = plan, trainer
        self.rule = plan.policy.nonfinite
        self.rewinds = self.rule.on_budget == "rewind"
        self._steps = StepTracker()
        self._bad: BadSteps | None = None
        self._attempts = self._skips = 0

    @property
    def skipped_steps(self) -> int:
        """The plan's count."""
        return self._plan.skipped_steps

    def check(self, faults: Faults) -> None:
        """Note what of it cannot be done in this run."""
        if self.rewinds:
            check_rewind(self._trainer, "nonfinite=NonFinite(on_budget='rewind')", "on_budget='raise'", faults)

    def install(self) -> None:
        """Follow the run from now on."""
        callbacks_of(self._trainer).insert(0, self)

    def remove(self) -> None:
        """Undo it."""
        callbacks = callbacks_of(self._trainer)
        if self in callbacks:
            callbacks.remove(self)
        if self._bad is not None:
            self._bad.close()

    @property
    def _engine(self) -> StepEngine:
        assert self._plan.engine is not None, "a fit runs under an engine"
        return self._plan.engine

    @property
    def _log(self) -> BadSteps:
        assert self._bad is not None, "on_train_start comes first"
        return self._bad

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note how the run ended."""
        if self._bad is not None:
            self._bad.close(exception)

    # ------------------------------------------------------------------ the step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the folder, and have verdicts left here.

        Raises:
            PlanError: another run is writing to the folder.
        """
        self._bad = BadSteps(trainer, self.rule.run_dir, _WRITER, saves=self.rule.save_batch, rewinds=self.rewinds)
        self._engine.deferred = []
        self._skips = self._plan.skipped_steps if self.rule.save_batch else 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch until its step is over."""
        self._steps.batch_starts(trainer)
        self._attempts = self._plan.loss_scaler.attempts
        self._log.remember(batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a skip: save the batch, write an event; past the budget rewind, or end the run.

        Raises:
            NonFiniteError: the budget is spent and nothing is to be rewound, or no checkpoint can be.
            LossScaleError: an overflow at the minimum loss scale, under ``at_min="raise"``.
        """
        if self._plan.loss_scaler.attempts == self._attempts:
            return  # in the middle of an accumulation window
        deferred = self._engine.deferred
        assert deferred is not None, "on_train_start comes first"
        verdict = deferred[0] if deferred else None
        deferred.clear()
        skipped = self._skipped()  # asked first: it counts from one step to the next
        if verdict is not None or skipped:
            self._explain(trainer, pl_module, verdict)
        self._log.forget()

    def _skipped(self) -> bool:
        """Whether a step of this batch was skipped: a device sync, for which only saving has a use."""
        if not self.rule.save_batch:
            return False
        before, self._skips = self._skips, self._plan.skipped_steps
        return self._skips > before

    def _explain(self, trainer: Trainer, module: LightningModule, verdict: Verdict | None) -> None:
        found, scale = self._log.locate(module), self._engine.loss_scale
        streak, step = self._plan.loss_scaler.streak, self._steps.step
        if verdict is None and scale is not None and is_ordinary(scale, found.bad_loss, at_floor=streak > 0):
            self._log.overflow(found, step=step, scale=scale)
            return
        rewinds = verdict is not None and self.rewinds and not verdict.at_min
        event = self._log.bad_step(
            found,
            step=step,
            bad_loss=found.bad_loss,
            action="rewind" if rewinds else "skip",
            in_a_row=max(streak, 1),
            allowed=0 if self.rule.action == "raise" else self.rule.max_consecutive,
            scale=scale,
            verdict=None if rewinds else verdict,
        )
        if rewinds:
            self._rewind(event)

    def _rewind(self, event: Event) -> None:
        """The loss scale goes back with the weights; the counts of the run go on."""
        counts = self._plan.loss_scaler.counts()
        self._log.rewind(event)
        self._plan.loss_scaler.load_counts(counts)
        self._engine.start_over()


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
