"""Non-finite losses and gradients for a project on stock plugins: skipped on every rank, traced, and saved."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Literal, get_args

from torch.optim import Optimizer

from lightning_mp.callbacks.acting import ActingCallback
from lightning_mp.compat.lightning import LightningModule, Trainer, TrainerFn
from lightning_mp.engines import closures
from lightning_mp.engines.skip_aware import SkipAwareHooks
from lightning_mp.errors import Faults
from lightning_mp.monitor.actions import ReduceLR, describe
from lightning_mp.monitor.callback_utils import StepTracker
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.nonfinite import messages, rewind
from lightning_mp.monitor.nonfinite.bad_steps import BadSteps
from lightning_mp.monitor.nonfinite.guarded_step import FLOOR, GuardedStep, guarded_step
from lightning_mp.monitor.run_log import RunDir, WritesRun

OnTrip = Literal["skip", "reduce_lr", "raise", "rewind"]
_WORDS = ", ".join(map(repr, get_args(OnTrip)))
_NAME = "NonFiniteGuard"


class NonFiniteGuard(ActingCallback, WritesRun):
    """Skips every step with a non-finite loss or gradient, on all ranks, and reports where the value first appeared.

    It does for Lightning's own plugins and strategies what ``nonfinite=`` does in a
    :class:`~lightning_mp.MixedPrecisionPlan`. A skipped step changes nothing: no weight, no decay, no optimizer state;
    step-interval schedulers and weight averages do not advance. The bad batch is run again once, under hooks, and an
    event names the rank whose own loss or gradients were bad, the first bad module in forward order, the parameter and
    the batch; ``events`` holds what ``events.jsonl`` holds. The batch, and the state of the random number generators
    before its forward, are saved in the same folder, for at most 10 steps a run; see :func:`replay_saved`. A normal
    step costs one pass over the gradients and one host read.

    Under stock ``16-mixed`` an overflow with a finite loss is the scaler's search for a scale, down to a scale of 1: it
    gives an ``info`` event, saves nothing and does not count against ``max_consecutive``.

    Args:
        on_trip: what to do besides skipping. ``"reduce_lr"`` or ``ReduceLR(factor, steps)`` lowers the learning rate
            for a while, on top of any scheduler; ``"raise"`` stops the run at once; ``"rewind"`` loads the last
            checkpoint of the Trainer's ``ModelCheckpoint`` whose weights are finite and continues after the bad batch.
        max_consecutive: how many skips in a row are allowed; the next raises ``NonFiniteError``.
        run_dir: the folder to write to; by default one of the run's own, in the logger's folder.

    Raises:
        PlanError: a bad argument, a MixedPrecisionPlan beside it (use its ``nonfinite=``), ``"rewind"`` without a
            ``ModelCheckpoint``, or an optimizer that evaluates its closure again (LBFGS).
    """

    plan_field = "nonfinite"

    def __init__(self, on_trip: OnTrip | ReduceLR = "skip", max_consecutive: int = 100, run_dir: RunDir = None) -> None:
        super().__init__()
        with Faults(_NAME) as faults:
            if not isinstance(on_trip, ReduceLR) and on_trip not in get_args(OnTrip):
                faults.add(f"on_trip={on_trip!r}", f"{_WORDS} or ReduceLR(factor, steps)", "use on_trip='skip'")
            faults.whole("max_consecutive", max_consecutive, 0, "use max_consecutive=100")
        self.on_trip = on_trip
        self._reduce = on_trip if isinstance(on_trip, ReduceLR) else ReduceLR() if on_trip == "reduce_lr" else None
        self.max_consecutive, self.run_dir = max_consecutive, run_dir
        self.events: list[Event] = []
        #: whether the last optimizer step was skipped
        self.step_skipped = False
        #: how many optimizer steps were skipped, a scaler's own skips included, and how many were not
        self.skipped_steps = self.applied_steps = 0
        self._in_a_row = 0
        self._before: weakref.ref[Trainer] | None = None
        self._run: _Run | None = None

    # ------------------------------------------------------------------ the run

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Begin to count; there is nothing to guard while evaluating."""
        if trainer.state.fn != TrainerFn.FITTING:
            return None
        if self.on_trip == "rewind":
            rewind.check(trainer, "on_trip='rewind'", "on_trip='skip'", faults)
        faults.raise_if_any()
        if self._before is None or self._before() is not trainer:  # a new run, not the next stage of this one
            self._before, self.events, self.step_skipped = weakref.ref(trainer), [], False
            self.skipped_steps = self.applied_steps = self._in_a_row = 0
        return self._end

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Undo, and note how the run ended."""
        self._end(exception)
        super().on_exception(trainer, pl_module, exception)

    def _end(self, error: BaseException | None = None) -> None:
        if self._run is not None:
            self._run.end(error)
            self._run = None
        if self._reduce is not None:
            self._reduce.release()

    def _count(self, skipped: bool) -> None:
        self.step_skipped = skipped
        self.skipped_steps += skipped
        self.applied_steps += not skipped

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the optimizers, which exist only now, and open the run's folder.

        Raises:
            PlanError: an optimizer whose step cannot be skipped from outside, or a folder that another run writes to.
        """
        guard = guarded_step(trainer, Faults(_NAME))
        run = self._run = _Run(trainer, self.run_dir, self._count, rewinds=self.on_trip == "rewind")
        run.guard = guard
        run.hooks.install(trainer, pl_module, run.is_skipped)

    # ------------------------------------------------------------------ the step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep a reference to the batch until its step is over."""
        assert self._run is not None
        self._run.begin(trainer, batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Note the loss."""
        assert self._run is not None
        self._run.steps.backward()
        self._run.backwards += 1
        self._run.guarded.add_loss(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Check loss and gradients, and drop the step if one is not finite.

        Raises:
            NonFiniteError: an optimizer that evaluates its closure again met the value after it had moved the weights.
        """
        run = self._run
        assert run is not None
        if not run.steps.begins(trainer) or (pl_module.automatic_optimization and run.backwards == 0):
            return
        again = pl_module.automatic_optimization and run.tried + run.dropped > 0
        bad_loss, bad_gradient = run.guarded.look(optimizer, drop=again and run.dropped > 0)
        bad = bad_loss or bad_gradient
        run.bad_loss |= bad_loss
        if bad and again and run.tried:
            raise closures.moved_already(optimizer, trainer.global_step)
        if bad:
            run.scale = run.guarded.scale()
        if not again and not run.guarded.steps_by_itself:
            run.count(skipped=bad)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count; after a dropped step find out why, write an event and act.

        Raises:
            NonFiniteError: the budget of skips is used up, ``on_trip="raise"``, or no checkpoint to rewind to.
        """
        run = self._run
        assert run is not None
        run.settle()
        if self._reduce is not None:
            self._reduce.after_batch(trainer)
        if run.dropped:
            self._explain(run, trainer, pl_module)
        elif run.tried:
            self._in_a_row = 0
        run.close()

    def _explain(self, run: _Run, trainer: Trainer, pl_module: LightningModule) -> None:
        diagnosis = run.log.locate(pl_module)
        if run.scale is not None and run.scale > FLOOR and not run.bad_loss:
            self._write(run, messages.overflow_event(diagnosis, step=run.steps.step, scale=run.scale))
            return
        self._in_a_row += 1
        allowed = 0 if self.on_trip == "raise" else self.max_consecutive
        event = messages.bad_step_event(
            diagnosis,
            step=run.steps.step,
            bad_loss=run.bad_loss,
            action="raise" if self._in_a_row > allowed else _word(self.on_trip),
            in_a_row=self._in_a_row,
            allowed=allowed,
            scale=run.scale,
            saved=run.log.name(diagnosis, run.steps.step),
            under_plan=False,  # beside which it is refused
        )
        run.log.save(diagnosis, event)
        self._write(run, event)
        self._act(run, event, trainer)

    def _act(self, run: _Run, event: Event, trainer: Trainer) -> None:
        if event.action == "raise":
            raise messages.nonfinite_error(event)
        if self._reduce is not None:
            self._reduce.start(trainer)
        elif self.on_trip == "rewind":
            run.log.rewind(event)

    def _write(self, run: _Run, event: Event) -> None:
        self.events.append(event)
        run.log.write(event)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, int]:
        """The counts."""
        return {
            "skipped_steps": self.skipped_steps,
            "applied_steps": self.applied_steps,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the counts."""
        self.skipped_steps, self.applied_steps = state_dict["skipped_steps"], state_dict["applied_steps"]
        self._in_a_row = state_dict["in_a_row"]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_run": None, "_before": None}


def _word(on_trip: ReduceLR | str) -> str:
    return describe(on_trip) if isinstance(on_trip, ReduceLR) else on_trip


class _Run:
    """The state of one guarded run, and of the current batch."""

    def __init__(self, trainer: Trainer, run_dir: RunDir, on_step: Callable[[bool], None], *, rewinds: bool) -> None:
        self.log = BadSteps(trainer, run_dir, _NAME, rewinds=rewinds)
        self.hooks, self.steps = SkipAwareHooks(), StepTracker()
        self.guard: GuardedStep | None = None
        self._on_step = on_step
        self._empty()

    def _empty(self) -> None:
        #: in the current batch: backward passes, steps that were let through, steps that were dropped
        self.backwards = self.tried = self.dropped = 0
        self.bad_loss = False
        self.scale: float | None = None

    @property
    def guarded(self) -> GuardedStep:
        assert self.guard is not None, "on_train_start comes first"
        return self.guard

    def begin(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A batch begins."""
        self._empty()
        if not trainer.lightning_module.automatic_optimization:
            self.guarded.forget_losses()
        self.steps.batch_starts(trainer)
        self.log.remember(batch, batch_idx)

    def settle(self) -> None:
        """Ask an engine that steps by itself whether it skipped."""
        skipped = self.guarded.outcome()
        if skipped is not None:
            self.scale = self.guarded.scale()
            self.count(skipped)

    def count(self, skipped: bool) -> None:
        """A step was let through, or dropped."""
        self.dropped += skipped
        self.tried += not skipped
        self._on_step(skipped)

    def is_skipped(self) -> bool:
        """Whether schedulers and averages must not advance."""
        self.settle()
        return self.dropped > 0

    def close(self) -> None:
        """The batch is over, and its accumulation window if a step was made."""
        self.steps.batch_ends()
        if self.tried or self.dropped:
            self.guarded.forget_losses()
            self.log.forget()

    def end(self, error: BaseException | None) -> None:
        """Undo everything."""
        self.hooks.remove()
        if self.guard is not None:
            self.guard.release()
        self.log.close(error)
