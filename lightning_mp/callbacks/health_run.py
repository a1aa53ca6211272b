"""One run under TrainingHealth: when to read, what a reading holds, and which step is left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_mp.callbacks.nonfinite_guard import NonFiniteGuard
from lightning_mp.compat.lightning import LightningModule, Trainer
from lightning_mp.engines import optimizer_facts
from lightning_mp.engines.skip_aware import SkipAwareHooks
from lightning_mp.errors import Faults, NonFiniteError
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.actions import withhold
from lightning_mp.monitor.alerts import Reading
from lightning_mp.monitor.callback_utils import Steps, callbacks_of, scale_source
from lightning_mp.monitor.events import Event, Kind
from lightning_mp.monitor.measure import Measuring, Values, unscales_in_step
from lightning_mp.monitor.nonfinite_events import NonFiniteWatch, Trouble
from lightning_mp.monitor.replay import Blame, Replayer
from lightning_mp.monitor.scale_sources import Number, Scale, ScaleSource, SkipCount
from lightning_mp.monitor.throughput import Work
from lightning_mp.precision import MixedPrecisionPlan

#: what LossScaleMonitor logs too
_SCALES = (metric_names.LOSS_SCALE, metric_names.SKIPPED_STEPS, metric_names.SKIPPED_IN_A_ROW)
_SKIPPED = "skipped"

#: the events that begin in a reading, among those that the user wants a step left out for
Judge = Callable[[Reading], list[Event]]


class HealthRun:
    """Follows the hooks of one run, in the order of its methods.

    Raises:
        PlanError: a group's pattern that matches nothing, or ``"skip"`` where a step cannot be left out.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        groups: Mapping[str, str],
        *,
        skips: Collection[Kind],
        work: Work,
    ) -> None:
        faults = Faults("TrainingHealth")
        if skips:
            _check_skips(trainer, module, faults)
        self._measuring = Measuring(trainer, module, groups, faults)
        faults.raise_if_any()
        self._module, self._skips, self.work = module, skips, work
        guards = [callback for callback in callbacks_of(trainer) if isinstance(callback, NonFiniteGuard)]
        self._guard = guards[0] if guards else None
        self._source = scale_source(trainer)
        counted = self._source if self._guard is None else _Guarded(self._source, self._guard)
        self._count = None if counted is None else SkipCount(counted)
        self._automatic = module.automatic_optimization
        self._early = bool(skips) or (self._automatic and not _keeps_bad_steps_back(trainer, self._source, guards))
        self._steps, self._replayer, self._hooks = Steps(), Replayer(), SkipAwareHooks()
        self._nonfinite = NonFiniteWatch()
        self._until_reading = self._batch_idx = self._steps_done = 0
        self._reading = self._in_window = False
        self._withheld_in_all = self._withheld_in_a_row = 0
        #: whether the step of the batch at hand was left out
        self.withheld = False
        self._early_values: Values | None = None
        self._early_events: list[Event] = []

    # ------------------------------------------------------------------ the step

    def batch_starts(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A training batch begins, and with it perhaps a step that is to be read."""
        self._steps.batch_starts(trainer)
        self._batch_idx, self.withheld = batch_idx, False
        if not self._in_window:
            self._in_window, self._reading = True, self._until_reading == 0
            self._early_values, self._early_events = None, []
            if self._reading:
                self._measuring.begin()
        if self._reading and self._guard is None:
            self._replayer.remember(trainer, batch, batch_idx)
        self.work.batch_starts(batch)

    def backward(self, loss: Any) -> None:
        """A backward pass begins."""
        self._steps.backward()
        if self._reading:
            self._measuring.add_loss(loss, self._source)

    def before_step(self, trainer: Trainer, optimizer: Optimizer, judge: Judge, lr_factor: float) -> None:
        """An optimizer is about to step: take its gradients, and leave the step out if it is judged so."""
        if not self._steps.begins(trainer):
            return
        if self._automatic:
            self.work.stop_counting()
        if self._count is not None:
            self._count.before_step()
        if self._reading:
            self._measuring.before_step(optimizer, self._source, lr_factor)
            if self._early and self._early_values is None:
                self._judge_early(trainer, optimizer, judge)

    def _judge_early(self, trainer: Trainer, optimizer: Optimizer, judge: Judge) -> None:
        values = self._early_values = self._measuring.read(self._scale_values())
        reading = self._reading_of(values)
        found = judge(reading)
        if self._automatic:
            self._early_events = self._nonfinite_events(trainer, reading)
        bad = [event for event in self._early_events if event.is_alert and event.kind in self._skips]
        if found or bad:
            self.withheld = True
            kept_back = partial(replace, severity="warning")  # what is not applied has done no harm
            self._early_events = [kept_back(event) if event.is_alert else event for event in self._early_events]
            withhold(optimizer, scaled=unscales_in_step(optimizer, self._source))
            if not self._hooks.active:
                self._hooks.install(trainer, self._module, lambda: self.withheld)
        self._early_events += found

    def batch_ends(self, trainer: Trainer, every_n_steps: int) -> tuple[Values, Reading, list[Event]] | None:
        """A training batch is over: what was read of its step, what its alerts look at, and what was seen already."""
        self.work.batch_ends()
        if not self._steps.batch_ends():
            return None
        self._in_window = False
        self._steps_done += 1
        if self._count is not None:
            self._count.after_batch()
        self._withheld_in_all += self.withheld
        self._withheld_in_a_row = (self._withheld_in_a_row + 1) * self.withheld
        self._until_reading = (self._until_reading or every_n_steps) - 1
        if not self._reading:
            return None
        values = self._finish()
        seconds = values.get("seconds")
        reading = replace(self._reading_of(values), seconds=None if seconds is None else seconds / self._steps_done)
        self._steps_done = 0
        events = self._early_events
        if not (self._early and self._automatic):
            events = [*self._nonfinite_events(trainer, reading), *events]
        self._replayer.forget()
        return _row(values, self.work), reading, events

    def _finish(self) -> Values:
        self._measuring.after_step()
        late = self._measuring.read({metric_names.LR: self._measuring.lr, **self._scale_values()}, self.work.take())
        values = {**(self._early_values or {}), **late}
        values[metric_names.SKIPPED_STEPS] = (values[metric_names.SKIPPED_STEPS] or 0.0) + self._withheld_in_all
        row = values[metric_names.SKIPPED_IN_A_ROW] or 0.0
        values[metric_names.SKIPPED_IN_A_ROW] = max(row, float(self._withheld_in_a_row))
        return values

    # ------------------------------------------------------------------ readings and events

    def _scale_values(self) -> dict[str, Number | None]:
        scale = self._scale()
        count = self._count
        return {
            metric_names.LOSS_SCALE: None if scale is None else scale.scale,
            metric_names.SKIPPED_STEPS: None if count is None else count.total,
            metric_names.SKIPPED_IN_A_ROW: None if count is None else count.in_a_row,
            _SKIPPED: None if count is None else count.skipped_last,
        }

    def _scale(self) -> Scale | None:
        return None if self._source is None else self._source.scale()

    def _reading_of(self, values: Values) -> Reading:
        scale, known = values[metric_names.LOSS_SCALE], self._scale()
        floor = 0.0 if known is None else known.floor
        return Reading(
            step=self._steps.step,
            loss=values.get(metric_names.LOSS),
            grad_norm=values.get(metric_names.GRAD_NORM),
            param_norm=values.get(metric_names.PARAM_NORM),
            update_ratio=values.get(metric_names.UPDATE_RATIO),
            loss_scale=scale,
            skipped=bool(values[_SKIPPED]) or self.withheld,
            skips_in_a_row=int(values[metric_names.SKIPPED_IN_A_ROW] or 0),
            scale_at_floor=scale is not None and scale <= floor,
            lr=values.get(metric_names.LR),
            tokens_per_s=values.get(metric_names.TOKENS_PER_S),
            samples_per_s=values.get(metric_names.SAMPLES_PER_S),
            memory_gib=values.get(metric_names.MEMORY_ALLOCATED),
        )

    def _nonfinite_events(self, trainer: Trainer, reading: Reading) -> list[Event]:
        """What is to be told of a step that is not finite; a NonFiniteGuard tells it itself."""
        trouble: Trouble | None = self._nonfinite.look(reading) if self._guard is None else None
        if trouble is None:
            return []
        blame = self._replayer.locate(trainer, self._module) if trouble.alert else Blame()
        return [trouble.event(blame, batch_idx=self._batch_idx)]

    def logged(self, trainer: Trainer, values: Values) -> dict[str, float]:
        """What of a reading goes to the loggers: what is known, once."""
        twice = any(isinstance(callback, LossScaleMonitor) for callback in callbacks_of(trainer))
        left_out = _SCALES if twice and values[metric_names.LOSS_SCALE] is not None else ()
        return {name: value for name, value in values.items() if value is not None and name not in left_out}

    def raised(self, error: NonFiniteError) -> list[Event]:
        """What the plan has ended the run with."""
        if self._guard is not None:
            return []
        bad_loss = self._measuring.loss_is_bad()
        return [
            Event(
                step=self._steps.step,
                kind="nonfinite_loss" if bad_loss else "nonfinite_grad",
                severity="error",
                rank=error.rank,
                module=error.module,
                parameter=error.parameter,
                evidence={"batch_idx": self._batch_idx},
                cause="see run.json for the error that ended the run",
                action="raise",
            )
        ]

    # ------------------------------------------------------------------ the end

    def give_back(self) -> None:
        """Let schedulers and weight averages move again."""
        self.work.stop_counting()
        self._hooks.remove()
        self._replayer.forget()


def _row(values: Values, work: Work) -> Values:
    """A reading as it is written, every name in it, in one order."""
    groups = sorted(name for name in values if name.startswith(f"{metric_names.GRAD_NORM}/"))
    names = (
        *(
            metric_names.LOSS,
            metric_names.GRAD_NORM,
            *groups,
            metric_names.PARAM_NORM,
            metric_names.UPDATE_RATIO,
            *_SCALES,
            metric_names.LR,
        ),
        *(metric_names.TOKENS_PER_S, metric_names.SAMPLES_PER_S),
    )
    memory = (metric_names.MEMORY_ALLOCATED, metric_names.MEMORY_RESERVED, metric_names.MEMORY_PEAK)
    flops = values.get("flops_per_s")
    mfu = flops / work.peak.flops_per_s if flops and work.peak is not None else None
    return {
        **{name: values.get(name) for name in names},
        metric_names.MFU: mfu,
        **{name: values.get(name) for name in memory},
    }


def _keeps_bad_steps_back(trainer: Trainer, source: ScaleSource | None, guards: Collection[NonFiniteGuard]) -> bool:
    """Whether somebody else keeps a non-finite step from being applied."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, MixedPrecisionPlan):
        return plugin.scaler is not None or plugin.policy.nonfinite.action != "ignore"
    return source is not None or bool(guards)


def _check_skips(trainer: Trainer, module: LightningModule, faults: Faults) -> None:
    """Note why a step cannot be left out."""
    from lightning_mp.compat.lightning import DeepSpeedStrategy

    given = "an action 'skip'"
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        faults.add(
            f"{given} under DeepSpeed, whose gradients are in its own partitions",
            "'log', 'stop', 'reduce_lr' or a callable",
            "use reduce_lr, or strategy='mp_fsdp2'",
        )
    if not module.automatic_optimization and len(trainer.optimizers) > 1:
        faults.add(f"{given} with {len(trainer.optimizers)} optimizers", "one optimizer", "use reduce_lr")
    for optimizer in filter(optimizer_facts.calls_closure_again, trainer.optimizers):
        faults.add(
            f"{given} with {type(optimizer).__name__}, which moves weights between two evaluations of its closure",
            "an optimizer that evaluates once a step",
            "use AdamW or SGD",
        )


class _Guarded:
    """The scale as its owner has it, and the skips that a NonFiniteGuard counts."""

    def __init__(self, source: ScaleSource | None, guard: NonFiniteGuard) -> None:
        self._source, self._guard = source, guard

    def scale(self) -> Scale | None:
        return None if self._source is None else self._source.scale()

    def before_step(self) -> None:
        """The guard counts by itself."""

    def after_step(self) -> None:
        """The guard counts by itself."""

    def skipped(self) -> Number:
        return self._guard.skipped_steps
