"""What a plan does around a fit besides its steps: it says what it will do, has the doctor look, guards the run."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.plan_base import PlanBase, began
from lightning_mp.errors import Faults
from lightning_mp.monitor.callback_utils import StepTracker, callbacks_of
from lightning_mp.monitor.doctor import warn_at_fit
from lightning_mp.monitor.nonfinite.bad_steps import BadSteps, check_rewind
from lightning_mp.monitor.run_log import WritesRun

_WRITER = "MixedPrecisionPlan"


class PlanRun(WritesRun):
    """One fit under a plan; where bad batches are to be saved or rewound, a callback of it, before all others.

    The engine decides and skips. Where it would raise it leaves its verdict here, and the batch, which is still at hand
    at its end, is run again, saved and written down; then the run is rewound, or ended with the error that the engine
    would raise.
    """

    def __init__(self, plan: PlanBase, trainer: Trainer, faults: Faults) -> None:
        self._plan, self._trainer = plan, trainer
        self.rule = plan.policy.nonfinite
        self._rewinds = self.rule.on_budget == "rewind"
        self._steps = StepTracker()
        self._bad: BadSteps | None = None
        self._attempts = self._skips = 0
        if self.rule.watches and self._rewinds:
            check_rewind(trainer, "nonfinite=NonFinite(on_budget='rewind')", "on_budget='raise'", faults)

    @property
    def skipped_steps(self) -> int:
        """The plan's count."""
        return self._plan.skipped_steps

    def begin(self, module: nn.Module, engine: StepEngine) -> None:
        """The module is about to be changed: warn of what can be seen, tell people and loggers."""
        if self.rule.watches:
            callbacks_of(self._trainer).insert(0, self)
        warn_at_fit(module, self._plan.policy)
        began(engine, module, self._trainer)

    def end(self) -> None:
        """Undo it."""
        callbacks = callbacks_of(self._trainer)
        if self in callbacks:
            callbacks.remove(self)
        if self._bad is not None:
            self._bad.close()

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
        self._bad = BadSteps(trainer, self.rule.run_dir, _WRITER, saves=self.rule.save_batch, rewinds=self._rewinds)
        assert self._plan.engine is not None, "a fit runs under an engine"
        self._plan.engine.deferred = []
        self._skips = self._plan.skipped_steps if self.rule.save_batch else 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep the batch until its step is over."""
        assert self._bad is not None, "on_train_start comes first"
        self._steps.batch_starts(trainer)
        self._attempts = self._plan.loss_scaler.attempts
        self._bad.remember(batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a skip: save the batch, write an event; past the budget rewind, or end the run.

        Raises:
            NonFiniteError: the budget is spent and nothing is to be rewound, or no checkpoint can be.
            LossScaleError: an overflow at the minimum loss scale, under ``at_min="raise"``.
        """
        scaler, engine = self._plan.loss_scaler, self._plan.engine
        if scaler.attempts == self._attempts:
            return  # in the middle of an accumulation window
        assert self._bad is not None, "on_train_start comes first"
        assert engine is not None
        assert engine.deferred is not None
        verdict = engine.deferred[0] if engine.deferred else None
        engine.deferred.clear()
        skipped = False
        if self.rule.save_batch:  # a device sync, for which only saving has a use
            before, self._skips = self._skips, self._plan.skipped_steps
            skipped = self._skips > before
        if verdict is not None or skipped:
            rewinds = verdict is not None and self._rewinds and not verdict.at_min
            counts, streak = scaler.counts(), scaler.streak
            self._bad.explain(
                pl_module,
                step=self._steps.step,
                action="rewind" if rewinds else "skip",
                in_a_row=max(streak, 1),
                allowed=0 if self.rule.action == "raise" else self.rule.max_consecutive,
                scale=engine.loss_scale,
                searching=verdict is None and streak == 0,
                verdict=None if rewinds else verdict,
            )
            if rewinds:  # the loss scale goes back with the weights; the counts of the run go on
                scaler.load_counts(counts)
                engine.start_over()
        self._bad.replayer.forget()
