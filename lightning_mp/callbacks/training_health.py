"""A run's health, every n-th step: measured, logged, checked by alerts, and acted on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from torch.optim import Optimizer

from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_mp.callbacks.nonfinite_guard import NonFiniteGuard
from lightning_mp.compat.deepspeed import is_partitioned
from lightning_mp.compat.lightning import LightningModule, Trainer, check_copy, rank_zero_warn
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.errors import Faults, NonFiniteError, PlanError
from lightning_mp.monitor import actions as acts
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.actions import Action, ActionLike, ReduceLR
from lightning_mp.monitor.alerts import Alerts, AlertSettings
from lightning_mp.monitor.callback_utils import callbacks_of
from lightning_mp.monitor.doctor import doctor
from lightning_mp.monitor.events import Event, Kind
from lightning_mp.monitor.findings import Finding
from lightning_mp.monitor.health.health_run import HealthRun
from lightning_mp.monitor.health.throughput import Count, Throughput
from lightning_mp.monitor.nonfinite.plan_guard import PlanGuard
from lightning_mp.monitor.run_log import RunDir, RunLog, WritesRun, is_fresh
from lightning_mp.numerics.device import describe

_NAME = "TrainingHealth"
#: what LightningModules log it under
_VAL_LOSSES = (metric_names.VAL_LOSS, "val_loss", "validation/loss", "valid_loss")


class TrainingHealth(WritesRun):
    """Measures loss, norms, learning rate, loss scale, speed and memory; reports what looks wrong, and acts on it.

    It works with Lightning's own plugins and strategies and with a MixedPrecisionPlan, on whole and on sharded
    parameters. Every reading goes to every logger and to ``metrics.jsonl`` in ``run_dir``, under the names of
    :mod:`lightning_mp.monitor.metric_names`; events go to ``events.jsonl`` and to the console, and their number to the
    loggers as ``health/events/<kind>``. ``rows`` and ``events`` hold the last 1,000. A ``step`` is the Trainer's
    ``global_step`` as the training step saw it. A value that is not known (MFU on a CPU) is ``None``.

    - ``train/loss``: the mean over the batches of the step and over all ranks, unscaled. Under manual optimization the
      sum of the losses passed to ``manual_backward``.
    - ``health/grad_norm``, and ``health/grad_norm/<group>``: 2-norm of the unscaled gradients, before clipping.
    - ``health/param_norm``: 2-norm of the trained parameters. ``health/update_ratio``: the norm of their change in the
      step over their norm before it; of a parameter with more elements, 16 evenly spaced pieces of 1,024 are compared.
    - ``health/lost_updates``: the share of updates that weights stored in half precision rounded away, of the same
      pieces; ``None`` where weights are fp32, or the optimizer loses none. ``health/fp8_flushed``: the largest share of
      values that FP8 flushed to zero, over layers and roles; each layer's numbers are in ``fp8_rows`` and
      ``fp8.jsonl``.
    - ``health/lr``: the rate of the first group of the first optimizer that stepped, as the step used it.
    - ``health/tokens_per_s``, ``health/samples_per_s``: over all ranks, since the last reading, validation excluded.
    - ``health/mfu``: FLOPs per token or sample, counted in the first batch, times the throughput, over the device's
      peak. Recomputation by activation checkpointing is not counted: on a decoder MosaicML's convention,
      6N + 12Lhs a token, less the table of input embeddings where it is only looked up.
    - ``val/loss``: what validation logged as ``val/loss`` or ``val_loss``, in a row of its own.
    - ``health/memory_*_gib``: the maximum over ranks; on a CPU the process's resident memory.

    Numbers stay on the device and are read together, once per reading; other steps only count skips. Where nothing
    else keeps a non-finite step from being applied (a stock plugin without a scaler), and for ``"skip"``, there is a
    second device sync before the step.

    Args:
        run_dir: the folder to write to; by default one of the run's own, in the logger's folder.
        every_n_steps: optimizer steps from one reading to the next.
        alerts: thresholds, as :class:`~lightning_mp.monitor.alerts.AlertSettings` or a mapping of its fields; False for
            none.
        actions: what to do about a kind of event: ``"log"`` (the default), ``"skip"`` (do not apply that step),
            ``ReduceLR(factor, steps)``, ``"stop"``, or a callable(event, trainer, pl_module), called on every rank.
        groups: group name to module pattern; the gradients of each group get a norm of their own.
        tokens: callable(batch) that counts the tokens of a batch; by default the size of ``input_ids``, or of the 2-D
            integer tensor that the batch is or begins with; ``None`` where neither is there.
        samples: callable(batch) that counts its samples; by default the length on which all its tensors agree, if the
            loader's ``batch_size`` says the same; ``None`` where they do not (a detector's images, a graph).
        peak_flops: peak FLOP/s of each device, for MFU; by default from its data sheet.
        report: write ``report.html`` into the folder when the run ends or fails.
        strict_actions: let a callable's exception end the run; by default it is logged, and the run continues.

    Raises:
        PlanError: an unknown kind, action, threshold or pattern, or ``"skip"`` where a step cannot be skipped.
    """

    def __init__(
        self,
        run_dir: RunDir = None,
        every_n_steps: int = 1,
        *,
        alerts: bool | Mapping[str, Any] | AlertSettings | None = None,
        actions: Mapping[str, ActionLike] | None = None,
        groups: Mapping[str, str] | None = None,
        tokens: Count | None = None,
        samples: Count | None = None,
        peak_flops: float | None = None,
        report: bool = True,
        strict_actions: bool = False,
    ) -> None:
        with Faults(_NAME) as faults:
            faults.whole("every_n_steps", every_n_steps, 1, "use every_n_steps=1")
            self.actions: dict[Kind, Action] = acts.parse(actions, faults)
        self.run_dir, self.every_n_steps, self.groups = run_dir, every_n_steps, dict(groups or {})
        self.tokens, self.samples, self.peak_flops = tokens, samples, peak_flops
        self.report, self.strict_actions = report, strict_actions
        self._alert_settings = AlertSettings.of(alerts)
        self._alerts = Alerts(self._alert_settings)
        self._log = RunLog(_NAME)
        self._run: HealthRun | None = None
        self._findings: list[Finding] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The last 1,000 readings, as written; ``metrics.jsonl`` has all."""
        return list(self._log.rows)

    @property
    def events(self) -> list[Event]:
        """The last 1,000 events, as written; ``events.jsonl`` has all."""
        return list(self._log.events)

    @property
    def fp8_rows(self) -> list[dict[str, Any]]:
        """Under ``"fp8-mixed"``: each layer's flushed share, amax and scale by role; the last 1,000 lines."""
        return list(self._log.fp8_rows)

    # ------------------------------------------------------------------ the run

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run the doctor, while the model is as the user made it."""
        check_copy(trainer, "TrainingHealth")
        begins = stage == "fit" and trainer.is_global_zero and not any(map(_is_split, pl_module.parameters()))
        self._findings = _examined(trainer, pl_module) if begins else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the parameters to measure, and open the folder.

        Raises:
            PlanError: a group's pattern that matches nothing, ``"skip"`` where a step cannot be left out, or a folder
                that another run or monitor writes to.
        """
        self._close()
        if is_fresh(trainer):
            self._alerts = Alerts(self._alert_settings)
        self._alerts.under_plan = isinstance(trainer.precision_plugin, PlanBase)
        throughput = Throughput(self.tokens, self.samples, self.peak_flops)
        beside = callbacks_of(trainer)
        self._run = HealthRun(
            trainer,
            pl_module,
            self.groups,
            skips=self._skips,
            throughput=throughput,
            guard=next(filter(_writes_bad_steps, beside), None),
            scale_logged=any(isinstance(callback, LossScaleMonitor) for callback in beside),
        )
        self._log.open(trainer, self.run_dir, fresh=is_fresh(trainer))
        if self._findings is not None:
            self._log.findings(self._findings)
        throughput.start(trainer)

    @property
    def _skips(self) -> list[Kind]:
        return [kind for kind, action in self.actions.items() if action == "skip"]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not time the start of the data loader."""
        self._here.throughput.epoch_starts()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do not time validation, and write the loss that it logged."""
        if self._run is None:
            return
        self._run.throughput.resumes()
        logged = trainer.callback_metrics
        loss = next((logged[name] for name in _VAL_LOSSES if name in logged), None)
        if loss is not None and not trainer.sanity_checking:
            self._log.row(trainer, trainer.global_step, {metric_names.VAL_LOSS: float(loss)}, {})

    # ------------------------------------------------------------------ the step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin a reading, if one is due."""
        self._here.batch_starts(trainer, batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Record the loss."""
        self._here.backward(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Measure the gradients; where the step may have to be skipped, run the alerts now."""
        factor = math.prod(reduction.still_to_come for reduction in self._reductions())
        self._here.before_step(trainer, optimizer, partial(self._alerts.judge, only=self._skips), factor)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read, log, run the alerts, act."""
        finished = self._here.batch_ends(trainer, self.every_n_steps)
        if finished is not None:
            values, reading, events = finished
            self._log.row(trainer, reading.step, values, self._here.logged(values))
            if reading.fp8:
                self._log.fp8(reading.step, reading.fp8)
            for event in (*events, *self._alerts.judge(reading)):
                self._log.event(trainer, self._act(event, trainer, pl_module))
        for reduction in self._reductions():
            reduction.after_batch(trainer)

    @property
    def _here(self) -> HealthRun:
        assert self._run is not None, "on_train_start comes first"
        return self._run

    # ------------------------------------------------------------------ acting

    def _act(self, event: Event, trainer: Trainer, pl_module: LightningModule) -> Event:
        """Carry out the action for ``event``; the event with the action taken."""
        action = self.actions.get(event.kind, "log")
        if not event.is_alert or action == "log":
            return event
        if action == "skip":
            return replace(event, action="skip" if self._here.suppressed else "log")
        if action == "stop":
            trainer.should_stop = True
        elif isinstance(action, ReduceLR):
            for reduction in self._reductions():
                reduction.release()
            action.start(trainer)
        else:
            return self._call(action, event, trainer, pl_module)
        return replace(event, action=acts.describe(action))

    def _call(self, action: Any, event: Event, trainer: Trainer, pl_module: LightningModule) -> Event:
        acted = replace(event, action=acts.describe(action))
        try:
            action(acted, trainer, pl_module)
        except Exception as error:
            failed = f"{acted.action} failed: {type(error).__name__}: {error}"
            if self.strict_actions:
                self._log.event(trainer, replace(acted, action=failed))
                raise
            rank_zero_warn(f"{_NAME}: the action for {event.kind} raised, and the run continues: {error!r}")
            return replace(acted, action=failed)
        return acted

    def _reductions(self) -> list[ReduceLR]:
        return [action for action in self.actions.values() if isinstance(action, ReduceLR)]

    # ------------------------------------------------------------------ the end, and checkpoints

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Undo what the actions changed, before the precision plugin undoes its own changes."""
        self._undo_actions()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write how the run ended, and its report."""
        self._close()
        self._log.close(trainer, report=self.report)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The same after a failure: Lightning calls no ``teardown`` of a callback then."""
        if self._run is not None and isinstance(exception, NonFiniteError):
            for event in self._run.raised(exception):
                self._log.event(trainer, event)
        self._close()
        self._log.close(trainer, report=self.report, error=exception)

    def _undo_actions(self) -> None:
        for reduction in self._reductions():
            reduction.release()
        if self._run is not None:
            self._run.close()

    def _close(self) -> None:
        self._undo_actions()
        self._run = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the state of the alerts, and the name of the folder."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint[_NAME] = self._alerts.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Restore it."""
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._alerts.load_state_dict(checkpoint.get(_NAME, {}))

    def __getstate__(self) -> dict[str, Any]:
        # A copy (a spawned process, a sweep) belongs to no run.
        return {**self.__dict__, "_run": None}


def _examined(trainer: Trainer, module: LightningModule) -> list[Finding] | None:
    """What the doctor finds without creating an optimizer; ``None`` for a precision plugin it does not know."""
    arguments = {"accumulate_grad_batches": trainer.accumulate_grad_batches}
    device = describe(trainer.strategy.root_device)
    try:
        return doctor(module, trainer.precision_plugin, trainer_args=arguments, optimizer=(), device=device)
    except PlanError:
        return None


def _writes_bad_steps(callback: object) -> TypeGuard[NonFiniteGuard | PlanGuard]:
    """Whether it writes the events of bad steps itself."""
    return isinstance(callback, NonFiniteGuard) or (isinstance(callback, PlanGuard) and callback.rule.save_batch)


def _is_split(parameter: object) -> bool:
    """Whether it is sharded since an earlier run: the doctor, on one rank, cannot read it."""
    return hasattr(parameter, "to_local") or is_partitioned(parameter)
