"""``NonFiniteGuard``: it skips, traces and saves non-finite steps of a project on stock plugins."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_mp.bad_steps.handler import BadSteps, check_rewind
from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule, Trainer, TrainerFn, begins_window
from lightning_mp.compat.torch import waits_for_unscale
from lightning_mp.errors import Faults
from lightning_mp.numerics import grads, nonfinite
from lightning_mp.numerics.nonfinite import Origin
from lightning_mp.plan import optimizer_facts
from lightning_mp.plan.acting import ActingCallback
from lightning_mp.plan.diagnosis import SEARCH_SKIPS, applied_none
from lightning_mp.plan.engine import max_over_ranks_
from lightning_mp.plan.skip_aware import Override, hold_on_skips
from lightning_mp.record.run_log import RunDir, RunLog, StepTracker, WritesRun, is_fresh

OnTrip = Literal["skip", "raise", "rewind"]
_NAME = "NonFiniteGuard"
#: at or below this loss scale, an overflow is no longer an ordinary one
_FLOOR = 1.0


class NonFiniteGuard(ActingCallback, WritesRun):
    """A callback that skips non-finite steps on all ranks, and reports their origin.

    A step is non-finite if its loss, or a gradient, is not finite on some rank.

    For Lightning's own plugins and strategies it does the work of ``nonfinite=`` in a
    :class:`~lightning_mp.MixedPrecisionPlan`. A skipped step changes no weight and no optimizer
    state. Step-interval schedulers and weight averages do not advance. A normal step costs one pass
    over the gradients and one device sync. Micro-batches stay in memory until their step is over.

    Under automatic optimization, the accumulation window of a skipped step is run again once, under
    hooks. An event then names the rank whose own loss or gradients were bad, the first bad module
    in forward order, the parameter and the batch. ``events`` has the last 1,000 events, and
    ``events.jsonl`` in the run's folder has all. For at most 10 steps a run, the batch and the
    state of the random generators before its forward are saved there: see :func:`replay_saved`.

    Under stock ``16-mixed``, an overflow with a finite loss is ordinary while the loss scale is
    above 1. It adds an ``info`` event. It saves no batch, does not trip ``on_trip``
    and does not count for ``max_consecutive``.

    Args:
        on_trip: the action besides skipping. ``"raise"`` ends the run with ``NonFiniteError``.
            ``"rewind"`` loads the newest checkpoint of this fit with finite weights, and continues
            after the bad batch.
        max_consecutive: the skips in a row that are allowed. The next one raises
            ``NonFiniteError``.
        run_dir: the folder to write to. By default it is the run's own, in the logger's folder.

    Raises:
        PlanError: a bad argument. Raised by the fit: a MixedPrecisionPlan is present (use its
            ``nonfinite=``), or ``"rewind"`` has no ``ModelCheckpoint``. Also raised for DeepSpeed,
            and for an optimizer that evaluates its closure again (LBFGS).
    """

    plan_field = "nonfinite"
    writes_every_event = True
    _of_run = ("_undo", "_run")

    def __init__(self, on_trip: OnTrip = "skip", max_consecutive: int = 100, run_dir: RunDir = None) -> None:
        super().__init__()
        with Faults(_NAME) as faults:
            faults.one_of("on_trip", on_trip, get_args(OnTrip), "use on_trip='skip'")
            faults.whole("max_consecutive", max_consecutive, 0, "use max_consecutive=100")
        self.on_trip, self.max_consecutive, self.run_dir = on_trip, max_consecutive, run_dir
        self._log = RunLog(_NAME)
        #: True if the last optimizer step was skipped
        self.step_skipped = False
        #: the numbers of skipped optimizer steps (also by a scaler) and of applied ones
        self.skipped_steps = self.applied_steps = 0
        #: the same counts before this fit's first step, from a checkpoint or an earlier fit
        self._skipped_before = self._applied_before = 0
        self._in_a_row = 0
        self._run: _Run | None = None

    def apply(self, trainer: Trainer, pl_module: LightningModule, faults: Faults) -> Callable[[], object] | None:
        """Check strategy and callbacks, and return the function that ends the run.

        Outside of ``fit``, nothing is guarded and ``None`` is returned.

        Raises:
            PlanError: the strategy is DeepSpeed, or ``"rewind"`` has no ``ModelCheckpoint``.
        """
        if trainer.state.fn != TrainerFn.FITTING:
            return None
        if isinstance(trainer.strategy, DeepSpeedStrategy):
            fix = "use MixedPrecisionPlan(nonfinite='skip') with strategy='mp_deepspeed_zero1', 2 or 3"
            faults.add("NonFiniteGuard cannot skip a step of DeepSpeed's, which alone has the gradients", fix=fix)
        if self.on_trip == "rewind":
            check_rewind(trainer, "on_trip='rewind'", "on_trip='skip'", faults)
        faults.raise_if_any()
        return self._end

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check the optimizers, open the run's folder, and begin to guard. Every rank calls it.

        Raises:
            PlanError: an optimizer evaluates its closure again, or another run writes to the
                folder.
        """
        with Faults(_NAME) as faults:
            for optimizer in filter(optimizer_facts.requires_closure, trainer.optimizers):
                what = f"{type(optimizer).__name__} moves weights between two evaluations of its closure"
                faults.add(f"{what}, so that its step cannot be skipped", fix="use AdamW or SGD")
        if is_fresh(trainer):
            self.step_skipped = False
            self.skipped_steps = self.applied_steps = self._in_a_row = 0
        self._skipped_before, self._applied_before = self.skipped_steps, self.applied_steps
        budget = f"{_NAME}(on_trip=..., max_consecutive=...)"
        bad_steps = BadSteps(trainer, self.run_dir, self._log, rewinds=self.on_trip == "rewind", budget=budget)
        self._run = _Run(trainer, pl_module, bad_steps, self)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise NonFiniteError if this fit applied none of its steps.

        A few ordinary overflows at the start, while a scaler finds its scale, raise nothing.
        """
        tried, applied = self.skipped_steps - self._skipped_before, self.applied_steps - self._applied_before
        if tried and not applied and (self._in_a_row or tried > SEARCH_SKIPS):
            raise applied_none(tried, None, f"{_NAME}('raise')")

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        self._end(error)
        super()._release(trainer, error)

    def _end(self, error: BaseException | None = None) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.overrides.close()
            run.bad_steps.close(error)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._run is not None
        self._run.begin(batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        if self._run is not None and trainer.training:  # a module may also train itself while evaluating
            self._run.steps.backward()
            self._run.losses.append(loss.detach().sum())

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a skipped step, run its batches again, write an event, and rewind or raise.

        Every rank must call it.

        Raises:
            NonFiniteError: more skips in a row than ``max_consecutive``, a skip under
                ``on_trip="raise"``, or no checkpoint to rewind to.
        """
        run = self._run
        assert run is not None
        if not run.steps.batch_ends():
            return  # no step: the accumulation window is still open, or the batch was None
        if run.dropped:
            # an overflow with a finite loss is ordinary: the scaler lowers its scale
            scale_warmup = not run.bad_loss and (run.scale or 0.0) > _FLOOR
            self._in_a_row += not scale_warmup
            allowed = 0 if self.on_trip == "raise" else self.max_consecutive
            kind = "loss" if run.bad_loss else "gradient"
            verdict = f"{self._in_a_row} in a row with a non-finite {kind}, {allowed} allowed"
            run.bad_steps.explain(
                action=self.on_trip,
                in_a_row=self._in_a_row,
                scale=run.scale,
                scale_warmup=scale_warmup,
                verdict=verdict if self._in_a_row > allowed and not scale_warmup else None,
                bad_loss=run.bad_loss,
                from_gradients=None if run.bad_loss else run.from_gradients,
            )
        else:
            self._in_a_row = 0
        run.losses.clear()
        run.bad_steps.replayer.forget()

    def state_dict(self) -> dict[str, int]:
        return {"skipped_steps": self.skipped_steps, "applied_steps": self.applied_steps, "in_a_row": self._in_a_row}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.skipped_steps, self.applied_steps = state_dict["skipped_steps"], state_dict["applied_steps"]
        self._in_a_row = state_dict["in_a_row"]


class _Run:
    """The state of one guarded run, and of the current batch. Every rank makes the same calls."""

    def __init__(self, trainer: Trainer, module: LightningModule, bad_steps: BadSteps, guard: NonFiniteGuard) -> None:
        self.trainer, self.bad_steps, self.guard = trainer, bad_steps, guard
        self.steps, self.overrides = StepTracker(), ExitStack()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scaler: Any = scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None
        #: the losses of the open accumulation window
        self.losses: list[Tensor] = []
        self._one = torch.ones((), dtype=torch.float32, device=trainer.strategy.root_device)
        self.overrides.callback(Override(module, "on_before_optimizer_step", self._last_hook).remove)
        self.overrides.callback(hold_on_skips(trainer, module, lambda: self.dropped > 0))
        self.dropped = 0

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Reset the state of the current batch, and keep the batch for a replay."""
        #: the number of skipped steps in the current batch
        self.dropped = 0
        self.bad_loss = False
        self.scale: float | None = None
        #: the origin guessed from the gradients, before they are dropped
        self.from_gradients: Origin | None = None
        if not self.trainer.lightning_module.automatic_optimization or begins_window(self.trainer, batch_idx):
            self.losses.clear()
        self.bad_steps.remember(batch, batch_idx)

    def _last_hook(self, original: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        """Check loss and gradients on all ranks, and skip the step if one is bad.

        Every rank must call it. The check comes after all other hooks, because they may change
        gradients.
        """
        original(optimizer)
        if not self.steps.begins(self.trainer):
            return
        flags = torch.zeros(2, dtype=torch.float32, device=self._one.device)
        if self.losses:
            flags[0] = (~torch.isfinite(torch.stack(self.losses))).any()
        grads.unscale_and_check_(grads.gradients(grads.parameters_of(optimizer)), self._one, flags[1], scaled=False)
        if self.trainer.world_size > 1:
            max_over_ranks_(flags)
        bad_loss, bad_gradient = map(bool, flags.tolist())  # the one device sync of a step
        guard = self.guard
        guard.step_skipped = bad_loss or bad_gradient
        guard.skipped_steps += guard.step_skipped
        guard.applied_steps += not guard.step_skipped
        if guard.step_skipped:
            self.dropped += 1
            self.bad_loss |= bad_loss
            self.scale = None if self.scaler is None else float(self.scaler.get_scale())
            self.from_gradients = self.from_gradients or nonfinite.from_gradients(self.trainer.lightning_module)
            suppress_step(optimizer, self.scaler)


def suppress_step(optimizer: Optimizer, scaler: GradScaler | None) -> None:
    """Drop all gradients of ``optimizer``, so that its next step changes nothing.

    torch's optimizers skip a parameter without a gradient. ``scaler`` is torch's, if the run has
    one. Gradients of a fused optimizer are unscaled before, because its scaled step would find no
    gradient to unscale.
    """
    if scaler is not None and waits_for_unscale(scaler, optimizer):
        scaler.unscale_(optimizer)
    grads.drop(optimizer)
