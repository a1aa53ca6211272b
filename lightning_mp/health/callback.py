"""``TrainingHealth``: a callback that measures and logs every n-th step, and acts on alerts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, cast, get_args

from torch.optim import Optimizer

from lightning_mp.bad_steps.guard import NonFiniteGuard, suppress_step
from lightning_mp.bad_steps.handler import NonFiniteClassifier, bad_step, has_bad_loss
from lightning_mp.bad_steps.replay import Replayer
from lightning_mp.compat.lightning import (
    DeepSpeedStrategy,
    LightningModule,
    Trainer,
    begins_window,
    check_copy,
    logged_step,
)
from lightning_mp.errors import Faults, NonFiniteError, PlanError
from lightning_mp.health.alerts import AT_FLOOR, FP8_SCALES, SKIPPED, Alerts, AlertSettings, Reading
from lightning_mp.health.fp8_scales import FP8Scales
from lightning_mp.health.loss_scale_monitor import LossScaleMonitor
from lightning_mp.health.measurement import LAG, StepMeasurement, ToHost, Values
from lightning_mp.health.scale_sources import Number, SkipCount, StockSource, scale_source
from lightning_mp.health.throughput import FLOPS, Count, Throughput
from lightning_mp.plan import optimizer_facts
from lightning_mp.plan.diagnosis import Diagnosis
from lightning_mp.plan.run import PlanBase
from lightning_mp.plan.skip_aware import hold_on_skips
from lightning_mp.record import metric_names
from lightning_mp.record.events import KINDS, Event, Kind
from lightning_mp.record.run_log import RunDir, RunLog, StepTracker, WritesRun, callbacks_of, is_fresh, log

_NAME = "TrainingHealth"
Action = Literal["log", "skip", "stop"]
#: the only kind with the action "skip"; a plan or a NonFiniteGuard skips non-finite steps
SPIKE: Kind = "grad_norm_spike"
#: common names of the validation loss in LightningModules
_VAL_LOSSES = (metric_names.VAL_LOSS, "val_loss", "validation/loss", "valid_loss")
#: the values that LossScaleMonitor logs too
_SCALES = (metric_names.LOSS_SCALE, metric_names.SKIPPED_STEPS)
#: the values of a written reading, in this order
_ROW = (
    metric_names.LOSS,
    metric_names.GRAD_NORM,
    metric_names.PARAM_NORM,
    metric_names.UPDATE_RATIO,
    *_SCALES,
    metric_names.FP8_SCALE_MIN,
    metric_names.FP8_SCALE_MAX,
    metric_names.LR,
    metric_names.TOKENS_PER_S,
    metric_names.SAMPLES_PER_S,
    metric_names.MFU,
    metric_names.MEMORY_ALLOCATED,
    metric_names.MEMORY_PEAK,
)


class TrainingHealth(WritesRun):
    """A callback that measures training steps, reports suspicious values, and acts on them.

    It measures loss, norms, learning rate, loss scale, speed and memory. Readings go to every
    logger and to ``metrics.jsonl``, under the names of :mod:`lightning_mp.record.metric_names`.
    Events go to ``events.jsonl`` and to the console, and their number to the loggers as
    ``health/events/<kind>``. ``rows`` and ``events`` hold the last 1,000. A ``step`` is the
    Trainer's ``global_step`` during the training step. An unknown value (MFU on a CPU) is ``None``.

    - ``train/loss``: the unscaled mean over the micro-batches of the step and over all ranks. Under
      manual optimization the losses passed to ``manual_backward`` are summed, not averaged.
    - Norms: 2-norms over all ranks, of unscaled gradients before clipping. In
      ``health/update_ratio`` 16 evenly spaced pieces of 1,024 numbers stand for a large parameter.
    - ``health/fp8_scale_min``, ``_max``: the smallest and the largest scale with which an FP8 layer
      rounds its input, its weight or its gradient. Under ``fp8-mixed``, in every second reading.
    - ``health/lr``: the rate of the first group of the first optimizer that stepped.
    - Throughput: over all ranks, since the last reading, without validation. FLOPs are counted in
      the first batch.
    - ``health/memory_*_gib``: the maximum over ranks. On a CPU it is the resident memory (Linux).

    A training step does not wait for the device, except a measured step with the action ``"skip"``.
    Numbers are evaluated when they have arrived, on CUDA at most 3 steps later. Until then the
    batches of a step are held in memory, of four steps at most. The end of validation, a checkpoint
    and the end of training wait for all numbers.

    Args:
        run_dir: the folder to write to. By default the run's own folder, in the logger's folder.
        every_n_steps: the number of optimizer steps from one reading to the next.
        alerts: the thresholds, as :class:`~lightning_mp.health.alerts.AlertSettings` or a mapping
            of its fields. False: no alerts.
        actions: by kind of event, ``"log"`` (the default) or ``"stop"``. For ``grad_norm_spike``
            also ``"skip"``: neither this step nor others of the same streak are applied. A streak
            has one event.
        tokens: a function of a batch that counts its tokens. By default the size of ``input_ids``.
            Without these, the size of a 2-D integer tensor that is the batch, or that is its first
            item if a tensor of the same shape (labels) follows. Otherwise ``None``. If the first
            batch has only zeros and ones, they are no tokens.
        samples: a function of a batch that counts its samples. By default the common length of all
            its tensors. ``None`` without a common length (a detector's images, a graph), or if it
            contradicts the loader's ``batch_size``.
        peak_flops: the peak FLOP/s of each device, for MFU. By default from its data sheet.
        report: write ``report.html`` into the folder when the run ends or fails.

    Raises:
        PlanError: an unknown kind, action or threshold, or ``"skip"`` for another kind.
    """

    _of_run = ("_run",)

    def __init__(
        self,
        run_dir: RunDir = None,
        every_n_steps: int = 1,
        *,
        alerts: bool | Mapping[str, Any] | AlertSettings | None = None,
        actions: Mapping[str, Action] | None = None,
        tokens: Count | None = None,
        samples: Count | None = None,
        peak_flops: float | None = None,
        report: bool = True,
    ) -> None:
        with Faults(_NAME) as faults:
            faults.whole("every_n_steps", every_n_steps, 1, "use every_n_steps=1")
            for kind, action in (actions or {}).items():
                if kind not in KINDS:
                    faults.unknown("kind of event", kind, KINDS)
                elif action == "skip" and kind != SPIKE:
                    guards = "for non-finite steps use a plan's nonfinite='skip', or NonFiniteGuard"
                    faults.add(f"actions[{kind!r}]='skip'", fix=f"'skip' works for {SPIKE}; {guards}")
                faults.one_of(f"actions[{kind!r}]", action, get_args(Action), "use 'log'")
        self.actions = cast("dict[Kind, Action]", dict(actions or {}))
        self.run_dir, self.every_n_steps, self.report = run_dir, every_n_steps, report
        self.tokens, self.samples, self.peak_flops = tokens, samples, peak_flops
        self._alerts = Alerts(alerts)
        self._log = RunLog(_NAME)
        self._run: _Run | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the last 1,000 readings, as written. ``metrics.jsonl`` has all."""
        return list(self._log.rows)

    # ------------------------------------------------------------------ the run

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the measurements, and open the folder.

        Raises:
            PlanError: an action is ``"skip"`` and steps cannot be skipped in this run. Or another
                run or monitor writes to the folder. Or the Trainer is of the other copy of
                Lightning.
        """
        check_copy(trainer, _NAME)
        self._close()
        if is_fresh(trainer):
            self._alerts = Alerts(self._alerts.settings)
        self._alerts.under_plan = isinstance(trainer.precision_plugin, PlanBase)
        self._run = _Run(trainer, pl_module, self)  # before open(), so that _release cleans up
        self._log.open(trainer, self.run_dir)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._active.throughput.pauses()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is None:
            return
        self._run.to_host.deliver(wait=True)
        self._run.throughput.pauses()
        logged = trainer.callback_metrics
        loss = next((logged[name] for name in _VAL_LOSSES if name in logged), None)
        if loss is not None and not trainer.sanity_checking:
            self._log.row(trainer.global_step, {metric_names.VAL_LOSS: float(loss)})

    # ------------------------------------------------------------------ the step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        run = self._active
        run.steps.batch_starts(trainer)
        if run.step.ended or begins_window(trainer, batch_idx):
            run.step = _Step(measures=run.until_reading == 0)
            if run.step.measures:
                run.measured.begin()
                run.fp8_scales.begin()
        run.step.number, run.step.batch_idx = run.steps.step, batch_idx
        if run.step.measures and run.guard is None:
            run.step.replayer.remember(trainer, batch, batch_idx)
        run.throughput.batch_starts(trainer, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        run = self._run
        if run is None or not trainer.training:
            return  # a module that adapts itself in evaluation calls backward too
        run.steps.backward()
        if run.step.measures:
            run.measured.add_loss(loss, run.source)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        run = self._run
        if run is None or not run.steps.begins(trainer):
            return
        run.count.before_step()
        if run.step.measures:
            run.measured.before_step(optimizer, run.source)
            run.fp8_scales.before_step()
            if run.checks_before_step and run.step.before is None:
                self._check_before_step(run, run.step, trainer, optimizer)

    def _check_before_step(self, run: _Run, step: _Step, trainer: Trainer, optimizer: Optimizer) -> None:
        """Read the numbers before the step, and skip the step if it is a spike with that action.

        A device sync.
        """
        step.before = run.to_host.read({**run.measured.take(), **run.count.values()})
        reading = step.reading(run.measured.derived(step.before), run.floor)
        if run.automatic:
            step.nonfinite = self._nonfinite(trainer, step, reading)
        if run.skips:
            step.spikes = self._alerts.judge(reading, only=(SPIKE,))
            step.suppressed = self._alerts.holds(SPIKE)
        if step.suppressed:
            run.suppressed += 1
            suppress_step(optimizer, run.source.scaler if isinstance(run.source, StockSource) else None)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        run, step = self._active, self._active.step
        run.throughput.batch_ends()
        if not run.steps.batch_ends():
            return
        run.count.after_batch()
        step.ended = True
        run.until_reading = (run.until_reading or self.every_n_steps) - 1
        if step.measures:
            run.measured.after_step()
            others = {metric_names.LR: run.measured.lr, SKIPPED: run.count.skipped_last}
            step.logged_step = logged_step(trainer)
            values = {**run.measured.take(run.throughput.take()), **run.count.values(), **others}
            values |= run.fp8_scales.take()
            run.to_host.send(values, partial(self._arrived, trainer, step))
        run.to_host.deliver()

    def _arrived(self, trainer: Trainer, step: _Step, late: Values) -> None:
        """Log the numbers of a step that have arrived on the host, run the alerts, and act."""
        run = self._active
        values = run.measured.derived({**(step.before or {}), **late})
        flops, peak = values[FLOPS], run.throughput.peak
        values[metric_names.MFU] = flops / peak if flops and peak else None
        scales = run.fp8_scales.split(values)
        if scales:
            values[metric_names.FP8_SCALE_MIN] = min(scales.values())
            values[metric_names.FP8_SCALE_MAX] = max(scales.values())
        reading = {**step.reading(values, run.floor), FP8_SCALES: scales}
        row = {name: values.get(name) for name in _ROW}
        self._log.row(step.number, row)
        left_out = _SCALES if run.scale_logged and row[metric_names.LOSS_SCALE] is not None else ()
        log(trainer, {name: v for name, v in row.items() if v is not None and name not in left_out}, step.logged_step)
        if step.nonfinite is None:
            step.nonfinite = self._nonfinite(trainer, step, reading)
        step.replayer.forget()
        for event in (*step.nonfinite, *step.spikes, *self._alerts.judge(reading)):
            self._log.event(trainer, self._act(event, trainer, step))

    def _nonfinite(self, trainer: Trainer, step: _Step, reading: Reading) -> list[Event]:
        """Return the event of a non-finite step as a list.

        The list is empty for a finite step, for an alert that was reported already, and if a guard
        writes an event for every non-finite step. For an alert the batches run again on all ranks,
        a collective.
        """
        run = self._active
        alert = None if run.guard is not None else run.classifier.judge(reading, suppressed=step.suppressed)
        if alert is None:
            return []
        locates = alert and not run.failed
        diagnosis = step.replayer.locate(trainer) if locates else Diagnosis()
        event = bad_step(
            diagnosis if diagnosis.batch_idx is not None else replace(diagnosis, batch_idx=step.batch_idx),
            step=step.number,
            bad_loss=has_bad_loss(reading),
            ordinary=not alert,
            severity="warning" if reading[SKIPPED] else "error",
            evidence={"loss_scale": reading[metric_names.LOSS_SCALE], "bad_steps_in_a_row": run.classifier.in_a_row},
            under_plan=self._alerts.under_plan,
        )
        return [event]

    def _act(self, event: Event, trainer: Trainer, step: _Step) -> Event:
        """Take the action for ``event``, and return the event with that action.

        The event is returned unchanged if it is no alert, if the run has failed, or if the step of
        an action ``"skip"`` was not skipped.
        """
        action = self.actions.get(event.kind, "log")
        if not event.is_alert or self._active.failed or (action == "skip" and not step.suppressed):
            return event
        trainer.should_stop = trainer.should_stop or action == "stop"
        return replace(event, action=action)

    @property
    def _active(self) -> _Run:
        assert self._run is not None, "on_train_start comes first"
        return self._run

    # ------------------------------------------------------------------ the end, and checkpoints

    # This hook runs before the precision plugin undoes its changes.
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._run is not None:
            self._run.to_host.deliver(wait=True)
        self._close()

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        """Write the end of the run, or ``error``, and the report."""
        run = self._run
        if run is not None and error is not None:
            run.failed = True  # other ranks may go on, so there are no replays and no collectives
            with suppress(RuntimeError):  # a failed device delivers nothing
                run.to_host.deliver(wait=True)
            if isinstance(error, NonFiniteError) and run.guard is None:
                self._log.event(trainer, _raised(error, run))
        self._close()
        self._log.close(trainer, error, report=self.report)

    def _close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.move_schedulers()
            run.throughput.stop_counting()
            run.fp8_scales.stop()
            run.step.replayer.forget()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._run is not None and not self._run.failed:
            self._run.to_host.deliver(wait=True)


@dataclass(slots=True)
class _Step:
    """The state of one step, from its first micro-batch until its numbers are on the host."""

    #: True if the step has a reading
    measures: bool
    ended: bool = False
    number: int = 0
    #: the index of the last batch
    batch_idx: int = 0
    logged_step: int = 0
    #: the numbers that were read before the optimizer stepped
    before: Values | None = None
    #: the events of a non-finite step; ``None`` before the check
    nonfinite: list[Event] | None = None
    spikes: list[Event] = field(default_factory=list[Event])
    replayer: Replayer = field(default_factory=Replayer)
    #: True if an alert skipped the step
    suppressed: bool = False

    def reading(self, values: Values, floor: float) -> Reading:
        """Return the numbers for the alerts. ``floor`` is the lowest loss scale."""
        scale = values[metric_names.LOSS_SCALE]
        known = {metric_names.STEP: self.number, SKIPPED: bool(values.get(SKIPPED))}
        return {**values, **known, AT_FLOOR: scale is not None and scale <= floor}


class _Run:
    """The state of one run and of its present step.

    Raises:
        PlanError: an action ``"skip"`` in a run whose steps cannot be skipped.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, health: TrainingHealth) -> None:
        self.measured = StepMeasurement(trainer, module)
        device, callbacks = trainer.strategy.root_device, callbacks_of(trainer)
        self.fp8_scales = FP8Scales(module, self.measured.layout, device, trainer.world_size)
        self.throughput = Throughput(trainer, health.tokens, health.samples, health.peak_flops)
        writers = (callback for callback in callbacks if isinstance(callback, WritesRun))
        #: a callback that writes an event for every non-finite step itself
        self.guard = next((writer for writer in writers if writer.writes_every_event), None)
        #: True if a LossScaleMonitor logs scale and skips already
        self.scale_logged = any(isinstance(callback, LossScaleMonitor) for callback in callbacks)
        # A step of several micro-batches is long over when the next one ends. A smaller lag then
        # costs no wait, and fewer windows are held in memory.
        window = trainer.accumulate_grad_batches if module.automatic_optimization else 1
        self.to_host = ToHost(device, trainer.world_size, lag=max(1, LAG // window))
        source = self.source = scale_source(trainer)
        #: the lowest loss scale
        self.floor = 0.0 if source is None else source.floor
        #: the number of steps that an alert skipped
        self.suppressed = 0
        self.count = SkipCount(source, self._skipped)
        self.move_schedulers: Callable[[], None] = lambda: None
        #: True if the step of a spike is skipped
        self.skips = "skip" in health.actions.values()
        if self.skips:
            _check_skips(trainer, module)
            self.move_schedulers = hold_on_skips(trainer, module, lambda: self.step.suppressed)
        self.automatic = module.automatic_optimization
        plugin, keeps_out = trainer.precision_plugin, self.guard is not None or source is not None
        if isinstance(plugin, PlanBase):
            keeps_out = plugin.scaler is not None or plugin.policy.nonfinite.action != "ignore"
        #: True if numbers are read before the optimizer's step. The action "skip" needs them. The
        #: diagnosis of a non-finite step that nothing else skips needs them too, because the step
        #: changes the weights. On CUDA only "skip" reads them, because that is a device sync.
        self.checks_before_step = self.skips or (self.automatic and not keeps_out and device.type != "cuda")
        self.steps, self.classifier = StepTracker(), NonFiniteClassifier()
        self.step = _Step(measures=True, ended=True)
        #: the number of optimizer steps before the next reading
        self.until_reading = 0
        self.failed = False

    def _skipped(self) -> Number:
        skipped = 0 if self.source is None else self.source.skipped()
        return self.suppressed + (self.guard.skipped_steps if isinstance(self.guard, NonFiniteGuard) else skipped)


def _raised(error: NonFiniteError, run: _Run) -> Event:
    """Return the event of the error by which the plan ended the run. A device sync."""
    return Event(
        step=run.step.number,
        kind="nonfinite_loss" if run.measured.loss_is_bad() else "nonfinite_grad",
        severity="error",
        rank=error.rank,
        module=error.module,
        parameter=error.parameter,
        evidence={"batch_idx": run.step.batch_idx},
        cause="see run.json for the error that ended the run",
        action="raise",
    )


def _check_skips(trainer: Trainer, module: LightningModule) -> None:
    """Raise a PlanError if steps of this run cannot be skipped.

    They cannot under DeepSpeed, with several optimizers in manual optimization, or with an
    optimizer that requires a closure.
    """
    again = [type(each).__name__ for each in filter(optimizer_facts.requires_closure, trainer.optimizers)]
    count = 1 if module.automatic_optimization else len(trainer.optimizers)
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        where = "under DeepSpeed, whose gradients are in its own partitions"
    elif count > 1:
        where = f"with {count} optimizers in manual optimization"
    elif again:
        where = f"with {', '.join(again)}, which moves weights between two evaluations of its closure"
    else:
        return
    raise PlanError.of(f"an action 'skip' {where}", "use 'stop'", _NAME)
