"""One run under TrainingHealth: which steps are measured, what a reading holds, and which step is left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim import Optimizer

from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule, Trainer
from lightning_mp.engines import optimizer_facts
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.engines.skip_aware import SkipAwareHooks
from lightning_mp.errors import Faults, NonFiniteError
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.actions import suppress
from lightning_mp.monitor.alerts import Reading
from lightning_mp.monitor.callback_utils import StepTracker, scale_source
from lightning_mp.monitor.events import Event, Kind
from lightning_mp.monitor.health.measurement import StepMeasurement, Values, unscales_in_step
from lightning_mp.monitor.health.scale_sources import GuardedSource, Number, Scale, ScaleSource, SkipCount
from lightning_mp.monitor.health.throughput import Throughput
from lightning_mp.monitor.nonfinite.events import NonFiniteClassifier, NonFiniteStep
from lightning_mp.monitor.nonfinite.replay import Diagnosis, Replayer

#: what LossScaleMonitor logs too
_SCALES = (metric_names.LOSS_SCALE, metric_names.SKIPPED_STEPS, metric_names.SKIPPED_IN_A_ROW)
_SKIPPED = "skipped"
#: what a written reading holds behind the loss and the gradient norms
_AFTER_GROUPS = (
    metric_names.PARAM_NORM,
    metric_names.UPDATE_RATIO,
    metric_names.LOST_UPDATES,
    metric_names.FP8_FLUSHED,
    *_SCALES,
    metric_names.LR,
    metric_names.TOKENS_PER_S,
    metric_names.SAMPLES_PER_S,
    metric_names.MFU,
    metric_names.MEMORY_ALLOCATED,
    metric_names.MEMORY_RESERVED,
    metric_names.MEMORY_PEAK,
)

#: the events that begin in a reading, of the kinds for which the user wants the step left out
Judge = Callable[[Reading], list[Event]]


class HealthRun:
    """Follows the hooks of one run, in the order of its methods.

    ``guard`` is the run's NonFiniteGuard, if it has one. ``scale_logged``: a LossScaleMonitor hands the scale and the
    skips to the loggers already.

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
        throughput: Throughput,
        guard: Any | None,
        scale_logged: bool,
    ) -> None:
        with Faults("TrainingHealth") as faults:
            if skips:
                _check_skips(trainer, module, faults)
            self._measured = StepMeasurement(trainer, module, groups, faults)
        self._module, self._skips, self.throughput = module, skips, throughput
        self._guard, self._scale_logged = guard, scale_logged
        self._source = scale_source(trainer)
        counted = self._source if guard is None else GuardedSource(self._source, guard)
        self._count = None if counted is None else SkipCount(counted)
        self._automatic = module.automatic_optimization
        self._early = bool(skips) or (self._automatic and not (guard or _skips_bad_steps(trainer, self._source)))
        self._steps, self._replayer, self._hooks = StepTracker(), Replayer(), SkipAwareHooks()
        self._nonfinite = NonFiniteClassifier()
        self._until_reading = self._batch_idx = self._steps_done = 0
        self._reading = self._in_window = False
        self._suppressed_in_all = self._suppressed_in_a_row = 0
        #: whether the step of the batch at hand was left out
        self.suppressed = False
        self._early_values: Values | None = None
        self._early_events: list[Event] = []

    # ------------------------------------------------------------------ the step

    def batch_starts(self, trainer: Trainer, batch: Any, batch_idx: int) -> None:
        """A training batch begins, and with it perhaps a step that is to be measured."""
        self._steps.batch_starts(trainer)
        self._batch_idx, self.suppressed = batch_idx, False
        if not self._in_window:
            self._in_window, self._reading = True, self._until_reading == 0
            self._early_values, self._early_events = None, []
            if self._reading:
                self._measured.begin()
        if self._reading and self._guard is None:
            self._replayer.remember(trainer, batch, batch_idx)
        self.throughput.batch_starts(trainer, batch)

    def backward(self, loss: Any) -> None:
        """A backward pass begins."""
        self._steps.backward()
        if self._reading:
            self._measured.add_loss(loss, self._source)

    def before_step(self, trainer: Trainer, optimizer: Optimizer, judge: Judge, lr_factor: float) -> None:
        """An optimizer is about to step: measure its gradients, and suppress the step if ``judge`` finds an event."""
        if not self._steps.begins(trainer):
            return
        if self._count is not None:
            self._count.before_step()
        if self._reading:
            self._measured.before_step(optimizer, self._source, lr_factor)
            if self._early and self._early_values is None:
                self._judge_early(trainer, optimizer, judge)

    def _judge_early(self, trainer: Trainer, optimizer: Optimizer, judge: Judge) -> None:
        values = self._early_values = self._measured.read(self._scale_values())
        reading = self._reading_of(values)
        found = judge(reading)
        if self._automatic:
            self._early_events = self._nonfinite_events(trainer, reading)
        bad = [event for event in self._early_events if event.is_alert and event.kind in self._skips]
        if found or bad:
            self.suppressed = True
            applied_nothing = partial(replace, severity="warning")  # what is not applied has done no harm
            self._early_events = [applied_nothing(event) if event.is_alert else event for event in self._early_events]
            suppress(optimizer, scaled=unscales_in_step(optimizer, self._source))
            if not self._hooks.active:
                self._hooks.install(trainer, self._module, lambda: self.suppressed)
        self._early_events += found

    def batch_ends(self, trainer: Trainer, every_n_steps: int) -> tuple[Values, Reading, list[Event]] | None:
        """A training batch is over: the row of its step, the reading for the alerts, and the events found already."""
        self.throughput.batch_ends()
        if not self._steps.batch_ends():
            return None
        self._in_window = False
        self._steps_done += 1
        if self._count is not None:
            self._count.after_batch()
        self._suppressed_in_all += self.suppressed
        self._suppressed_in_a_row = (self._suppressed_in_a_row + 1) * self.suppressed
        self._until_reading = (self._until_reading or every_n_steps) - 1
        if not self._reading:
            return None
        values = self._finish()
        seconds = values.get("seconds")
        reading = replace(self._reading_of(values), seconds=None if seconds is None else seconds / self._steps_done)
        self._steps_done = 0
        events = self._early_events
        if not (self._early and self._automatic):
            # skipped for what was finite when it was measured: a hook that came later changed it
            changed = reading.skipped and not self.suppressed
            events = [*self._nonfinite_events(trainer, reading, changed=changed and _is_finite(reading)), *events]
        self._replayer.forget()
        return _row(values, self.throughput), reading, events

    def _finish(self) -> Values:
        self._measured.after_step()
        late = self._measured.read({metric_names.LR: self._measured.lr, **self._scale_values()}, self.throughput.take())
        values = {**(self._early_values or {}), **late}
        if late[_SKIPPED] or self.suppressed:
            values[metric_names.LOST_UPDATES] = None  # there was no update
        values[metric_names.SKIPPED_STEPS] = (values[metric_names.SKIPPED_STEPS] or 0.0) + self._suppressed_in_all
        row = values[metric_names.SKIPPED_IN_A_ROW] or 0.0
        values[metric_names.SKIPPED_IN_A_ROW] = max(row, float(self._suppressed_in_a_row))
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
            lost_updates=values.get(metric_names.LOST_UPDATES),
            fp8=self._measured.operands,
            loss_scale=scale,
            skipped=bool(values[_SKIPPED]) or self.suppressed,
            skips_in_a_row=int(values[metric_names.SKIPPED_IN_A_ROW] or 0),
            scale_at_floor=scale is not None and scale <= floor,
            lr=values.get(metric_names.LR),
            tokens_per_s=values.get(metric_names.TOKENS_PER_S),
            samples_per_s=values.get(metric_names.SAMPLES_PER_S),
            memory_gib=values.get(metric_names.MEMORY_ALLOCATED),
        )

    def _nonfinite_events(self, trainer: Trainer, reading: Reading, *, changed: bool = False) -> list[Event]:
        """The event of a non-finite step; a NonFiniteGuard writes its own."""
        step: NonFiniteStep | None = None
        if self._guard is None:
            step = self._nonfinite.judge(reading, changed=changed)
        if step is None:
            return []
        diagnosis = self._replayer.locate(trainer, self._module) if step.alert else Diagnosis()
        under_plan = isinstance(trainer.precision_plugin, PlanBase)
        return [step.event(diagnosis, batch_idx=self._batch_idx, under_plan=under_plan)]

    def logged(self, values: Values) -> dict[str, float]:
        """The known values, for the loggers, without those that a LossScaleMonitor logs already."""
        left_out = _SCALES if self._scale_logged and values[metric_names.LOSS_SCALE] is not None else ()
        return {name: value for name, value in values.items() if value is not None and name not in left_out}

    def raised(self, error: NonFiniteError) -> list[Event]:
        """The event of the error with which the plan has ended the run."""
        if self._guard is not None:
            return []
        bad_loss = self._measured.loss_is_bad()
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

    def close(self) -> None:
        """Let schedulers and weight averages move again, and drop the batches."""
        self.throughput.stop_counting()
        self._hooks.remove()
        self._replayer.forget()


def _row(values: Values, throughput: Throughput) -> Values:
    """A reading as it is written: every name, always in the same order."""
    flops = values.get("flops_per_s")
    mfu = flops / throughput.peak.flops_per_s if flops and throughput.peak is not None else None
    groups = sorted(name for name in values if name.startswith(f"{metric_names.GRAD_NORM}/"))
    names = (metric_names.LOSS, metric_names.GRAD_NORM, *groups, *_AFTER_GROUPS)
    return {name: mfu if name == metric_names.MFU else values.get(name) for name in names}


def _is_finite(reading: Reading) -> bool:
    return all(value is not None and math.isfinite(value) for value in (reading.loss, reading.grad_norm))


def _skips_bad_steps(trainer: Trainer, source: ScaleSource | None) -> bool:
    """Whether the precision plugin or its scaler skips a non-finite step."""
    plugin = trainer.precision_plugin
    if isinstance(plugin, PlanBase):
        return plugin.scaler is not None or plugin.policy.nonfinite.action != "ignore"
    return source is not None


def _check_skips(trainer: Trainer, module: LightningModule, faults: Faults) -> None:
    """Note why a step cannot be left out."""
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
