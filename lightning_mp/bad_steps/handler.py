"""The handling of non-finite steps under ``NonFiniteGuard`` and under a plan.

A step is diagnosed, its batch is saved, an event is written, and the run may be rewound.
"""

import math
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mp.bad_steps.replay import KeptBatch, Replayer
from lightning_mp.checkpoints import formats
from lightning_mp.compat.lightning import (
    LightningModule,
    ModelCheckpoint,
    Trainer,
    checkpoint_connector,
    finish_saving,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_mp.errors import Faults, PlanError
from lightning_mp.health.alerts import AT_FLOOR, SKIPPED, Reading
from lightning_mp.numerics import nonfinite
from lightning_mp.numerics.dtypes import map_tensors
from lightning_mp.numerics.nonfinite import Origin
from lightning_mp.numerics.rng import set_rng_state
from lightning_mp.plan.diagnosis import AT_MIN, SEARCH_SKIPS, Diagnosis
from lightning_mp.plan.engine import max_over_ranks_
from lightning_mp.plan.run import PlanBase
from lightning_mp.plan.side_run import loss_of, step_output
from lightning_mp.plan.skip_aware import Override
from lightning_mp.record import file_format, metric_names
from lightning_mp.record.events import Event, Severity
from lightning_mp.record.run_folder import BATCH_FILES, BATCHES
from lightning_mp.record.run_log import RunDir, RunLog, WritesRun, callbacks_of

#: the most steps of a run whose batches are saved; the first ones are the most useful
MAX_STEPS = 10
_NO_CHECKPOINT = (
    "it was to be rewound, and no checkpoint with finite weights was written before it: save earlier, with "
    "ModelCheckpoint(every_n_train_steps=...)"
)


def bad_step(
    diagnosis: Diagnosis,
    *,
    step: int,
    bad_loss: bool,
    ordinary: bool,
    severity: Severity,
    evidence: Mapping[str, Any],
    under_plan: bool,
    action: str = "log",
) -> Event:
    """Return the event of a non-finite step.

    Args:
        diagnosis: the origin of the non-finite value.
        step: the number of the step.
        bad_loss: the loss was non-finite, and not only a gradient.
        ordinary: an overflow after which the scaler skips the step and lowers its scale. The event
            is then an ``info`` one with the action ``skip``, whatever ``severity`` and ``action``
            are. Its evidence is the loss scale.
        severity: the severity of other events.
        evidence: numbers by name, with a ``loss_scale``. A number that is ``None`` is left out.
        under_plan: the advice names fields of a plan.
        action: the action taken for other events.
    """
    if ordinary:
        severity, action, known = "info", "skip", {"loss_scale": evidence["loss_scale"]}
        cause, advice = "the loss scale has become too large; the scaler lowers it", ""
    else:
        cause, advice = diagnosis.cause, diagnosis.advice(bad_loss, under_plan=under_plan)
        known = {"batch_idx": diagnosis.batch_idx, **evidence}
    return Event(
        step=step,
        kind="nonfinite_loss" if bad_loss else "nonfinite_grad",
        severity=severity,
        rank=diagnosis.rank,
        module=diagnosis.module,
        parameter=diagnosis.parameter,
        evidence={name: number for name, number in known.items() if number is not None},
        cause=cause,
        advice=advice,
        action=action,
    )


class BadSteps:
    """The handler of one run's non-finite steps. Every rank makes the same calls.

    Args:
        trainer: the Trainer of the run.
        run_dir: the run's folder, or ``None`` for the default one.
        log: the log that writes events. It is opened here.
        rewinds: a checkpoint may have to be loaded, so the fit's saved checkpoints are recorded.
        saves: save bad batches, of at most ``MAX_STEPS`` steps a run, in the run's folder as
            ``nonfinite/step_000017_rank1.pt``.
        budget: for messages, the argument with the number of allowed skips. Empty under a plan.

    Raises:
        PlanError: another run, or a second writer of this name, is writing to the folder.
    """

    def __init__(
        self, trainer: Trainer, run_dir: RunDir, log: RunLog, *, rewinds: bool, saves: bool = True, budget: str = ""
    ) -> None:
        self._trainer, self._log, self._budget = trainer, log, budget
        log.open(trainer, run_dir)
        folder = log.folder
        before = [] if folder is None else list((folder.path / BATCHES).glob(BATCH_FILES))
        left = MAX_STEPS - len({path.name.rpartition("_")[0] for path in before}) if saves else 0
        # Only the first rank has the folder, and all ranks must agree on the number of saved steps.
        path, self._left = trainer.strategy.broadcast(("" if folder is None else str(folder.path), left))
        self._saved_in = Path(path, BATCHES)
        self.replayer, self._step = Replayer(), 0
        self._checkpoints = SavedByFit(trainer) if rewinds else None

    def remember(self, batch: Any, batch_idx: int) -> None:
        """Keep a reference to a batch that begins."""
        self._step = self._trainer.global_step
        self.replayer.remember(self._trainer, batch, batch_idx)

    def explain(
        self,
        *,
        action: str,
        in_a_row: int,
        scale: float | None,
        scale_warmup: bool,
        verdict: str | None,
        bad_loss: bool | None = None,
        from_gradients: Origin | None = None,
    ) -> None:
        """Run the batches of a skipped step again, write and print an event, and rewind or raise.

        The bad batch is saved first. Every rank must call it. An ordinary overflow saves nothing
        and does not rewind.

        Args:
            action: ``"rewind"`` to load a checkpoint. Other words only go into the event.
            in_a_row: the skipped steps in a row.
            scale: the loss scale, or ``None`` without loss scaling.
            scale_warmup: a finite loss, with a loss scale, makes the step an ordinary overflow.
            verdict: the reason why the run ends, or ``None`` if it continues.
            bad_loss: the loss was non-finite. ``None`` leaves this to the replay.
            from_gradients: the origin guessed from the gradients, or ``None``.

        Raises:
            NonFiniteError: there is a ``verdict``, or no checkpoint to rewind to.
            LossScaleError: the verdict is an overflow at the minimum loss scale.
        """
        diagnosis = self.replayer.locate(self._trainer, from_gradients)
        bad_loss = diagnosis.bad_loss if bad_loss is None else bad_loss
        ordinary = scale_warmup and scale is not None and not bad_loss
        event = bad_step(
            diagnosis,
            step=self._step,
            bad_loss=bad_loss,
            ordinary=ordinary,
            severity="warning" if verdict is None else "error",
            action=action if verdict is None else "raise",
            evidence={"skips_in_a_row": in_a_row, "loss_scale": scale},
            under_plan=not self._budget,
        )
        if not ordinary:
            if self._left > 0:
                name = _file_name(self._step, "*" if diagnosis.rank is None else diagnosis.rank)
                event = replace(event, advice=f"{event.advice}; its batch is in {BATCHES}/{name}")
            self._save(self.replayer.kept(diagnosis.batch_idx), event)
        self._log.event(self._trainer, event)
        if event.action == "rewind" and not self._rewound():
            verdict = _NO_CHECKPOINT
        if verdict is not None:
            budget = {"budget": self._budget} if self._budget else {}
            raise diagnosis.error(verdict, bad_loss=bad_loss, step=self._step, scale=scale, **budget)

    def close(self, error: BaseException | None = None) -> None:
        """Drop the batches and close the log. ``error`` is set if the run failed."""
        self.replayer.forget()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._log.close(self._trainer, error)

    def _save(self, kept: KeptBatch | None, event: Event) -> None:
        """Write a batch as a dict, on the event's rank, or on every rank if the event has none.

        Keys of the dict are ``batch``, ``batch_idx``, ``step``, ``rank``, ``accumulate``, ``rng``,
        ``loss_scale`` and ``event``. ``batch`` is on the CPU, as ``training_step`` got it.
        ``accumulate`` is the number of micro-batches of a step. ``rng`` has the random generators
        before the forward. ``torch.load(weights_only=True)`` can read it if the batch has only
        tensors in plain containers.

        Nothing is written for ``None``, or after ``MAX_STEPS`` steps. If writing fails, a warning
        is given.
        """
        rank = self._trainer.global_rank
        self._left -= 1
        if self._left < 0 or kept is None or event.rank not in (None, rank):
            return
        contents = {
            # clone: torch.save would write the whole storage of a view
            "batch": map_tensors(kept.batch, lambda tensor: tensor.detach().cpu().clone()),
            "batch_idx": kept.batch_idx,
            "step": event.step,
            "rank": rank,
            "accumulate": kept.parts,
            "rng": kept.rng,
            "loss_scale": None if kept.scale is None else float(kept.scale),
            "event": event.to_dict(),
        }
        path = self._saved_in / _file_name(event.step, rank)
        try:
            self._saved_in.mkdir(parents=True, exist_ok=True)
            torch.save(file_format.stamped(contents), path)
        except Exception as error:  # unpicklable batch, full disk: the run continues
            rank_zero_warn(f"the bad batch of step {event.step} could not be saved: {type(error).__name__}: {error}")
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _rewound(self) -> bool:
        """Load the newest checkpoint with finite weights, or return False without one.

        Weights, optimizers, schedulers and the precision's state are loaded.
        ``trainer.global_step``, loops, data and callbacks continue from where they are. Only
        checkpoints that this fit saved, or resumed from, are loaded, because reading may run code
        of the file. Without a finite checkpoint, the oldest one stays loaded.

        Every rank must call it. If a save that is under way fails, its error is raised.
        """
        assert self._checkpoints is not None, "a run that may rewind"
        trainer = self._trainer
        for path in self._checkpoints.newest_first():
            with checkpoint_connector(trainer) as connector:
                connector.resume_start(path, weights_only=False)  # it may have any hyperparameters
                connector.restore_model()
                connector.restore_precision_plugin_state()
                connector.restore_optimizers_and_schedulers()
                connector.resume_end()
            bad = nonfinite.from_parameters(trainer.lightning_module) is not None
            flag = torch.full((), float(bad), dtype=torch.float32, device=trainer.strategy.root_device)
            if trainer.world_size > 1:
                max_over_ranks_(flag)
            if not flag.item():
                rank_zero_info(f"{self._log.writer}: loaded {path}, and continues after the batch of step {self._step}")
                return True
        return False


class SavedByFit:
    """A record of the checkpoints with optimizer states of a fit: saved by it, or resumed from.

    It wraps ``trainer.save_checkpoint``, so every callback's checkpoints are in it. A
    ModelCheckpoint cannot serve for this, because it may also name files of an earlier run.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        #: in the order in which they were last saved
        self._paths: dict[str, None] = {}
        if trainer.ckpt_path is not None:
            self._paths[os.fspath(trainer.ckpt_path)] = None
        self._override = Override(trainer, "save_checkpoint", self._save)

    def _save(self, save: Callable[..., None], filepath: Any, weights_only: bool | None = None, **options: Any) -> None:
        path = os.fspath(filepath)
        self._paths.pop(path, None)
        save(filepath, weights_only, **options)
        if not weights_only:
            self._paths[path] = None

    def newest_first(self) -> list[str]:
        """Return the paths of the checkpoints that still exist on the first rank, the newest first.

        Every rank must call it. A save that is under way is awaited, and its error is raised.
        """
        finish_saving(self._trainer.strategy)
        there = [path for path in reversed(self._paths) if formats.exists(path)]
        return self._trainer.strategy.broadcast(there)

    def close(self) -> None:
        """Restore ``trainer.save_checkpoint``."""
        self._override.remove()


def _file_name(step: int, rank: int | str) -> str:
    return f"step_{step:06d}_rank{rank}.pt"


def replay_saved(
    path: str | os.PathLike[str],
    module: LightningModule,
    context: AbstractContextManager[Any],
    *,
    weights_only: bool = True,
) -> tuple[Tensor | None, Origin | None]:
    """Run a saved batch through ``module`` again, and return its loss and the non-finite origin.

    The loss is detached, and as ``training_step`` returned it. It is ``None`` if ``training_step``
    returned none. The origin is ``None`` if all values are finite. Gradients are added to the
    parameters, divided by the number of micro-batches and times the loss scale, as in the step. The
    global random generators are set to their state before the step, and advance.

    Args:
        path: a file that a plan or a :class:`NonFiniteGuard` saved.
        module: the module with the weights to run with, on the device to run on. The file has no
            weights.
        context: the autocast context of the run's precision, such as
            ``torch.autocast("cuda", torch.bfloat16)`` for ``bf16-mixed``, or ``nullcontext()`` for
            ``32-true``.
        weights_only: as for ``torch.load``. Pass ``False`` if the batch has other objects than
            tensors in plain containers, and you trust the file.

    Raises:
        PlanError: a newer release of this package wrote the file.
    """
    saved = torch.load(path, map_location="cpu", weights_only=weights_only)
    if said := file_format.newer(saved):
        raise PlanError.of(f"{os.fspath(path)} {said}", file_format.UPDATE, "replay_saved")
    device = next(module.parameters()).device
    batch = map_tensors(saved["batch"], lambda tensor: tensor.to(device))
    set_rng_state(saved["rng"], device)
    losses: list[Tensor] = []

    def run() -> Tensor | None:
        with context:
            loss: Tensor | None = loss_of(step_output(module, batch, saved["batch_idx"]))
        if loss is not None:
            losses.append(loss.detach())
            (loss.float() / saved["accumulate"] * (saved["loss_scale"] or 1.0)).backward()
        return loss

    origin = nonfinite.locate(module, run)
    return (losses[0] if losses else None), origin


def check_rewind(trainer: Trainer, given: str, instead: str, faults: Faults) -> None:
    """Add a fault if no ModelCheckpoint of the Trainer saves optimizer states for a rewind.

    ``given`` is the argument that asks for a rewind, ``instead`` the one to write without
    checkpoints.
    """
    if not _writers(trainer):
        what = f"{given} without a ModelCheckpoint that saves optimizer states"
        faults.add(what, fix=f"add ModelCheckpoint(every_n_train_steps=...) to the callbacks, or use {instead}")


def _writers(trainer: Trainer) -> list[ModelCheckpoint]:
    """Return the callbacks whose checkpoints have optimizer states."""
    callbacks = (callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
    return [callback for callback in callbacks if not callback.save_weights_only]


class BadStepCallback(WritesRun):
    """The first callback of a fit under a plan that saves bad batches or rewinds.

    The engine decides and skips steps. Instead of raising, it reports its verdict to this callback.
    The batch is run again and saved at its end, when it is still in memory. The run then rewinds,
    or ends with the engine's error. Contradictions are added to ``faults``.
    """

    def __init__(self, plan: PlanBase, trainer: Trainer, faults: Faults) -> None:
        self._plan, self._trainer, rule = plan, trainer, plan.policy.nonfinite
        self.rule, self.run_dir, self.writes_every_event = rule, rule.run_dir, rule.save_batch
        self._rewinds = rule.on_budget == "rewind"
        self._log = RunLog("MixedPrecisionPlan")
        self._bad: BadSteps | None = None
        self._verdicts: list[str] = []
        self._attempts = self._skips = 0
        if self._rewinds:
            check_rewind(trainer, "nonfinite=NonFinite(on_budget='rewind')", "on_budget='raise'", faults)

    def insert(self) -> None:
        """Make this the Trainer's first callback."""
        callbacks_of(self._trainer).insert(0, self)

    def remove(self) -> None:
        """Remove this from the Trainer's callbacks, and close the run's folder."""
        callbacks = callbacks_of(self._trainer)
        if self in callbacks:
            callbacks.remove(self)
        self._release(self._trainer)

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        if self._bad is not None:
            self._bad.close(error)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the run's folder, and receive the engine's verdicts. Every rank calls it.

        Raises:
            PlanError: another run is writing to the folder.
        """
        saves = self.rule.save_batch
        self._bad = BadSteps(trainer, self.run_dir, self._log, saves=saves, rewinds=self._rewinds)
        assert self._plan.engine is not None, "a fit runs under an engine"
        self._plan.engine.report = self._verdicts.append
        self._skips = self._plan.skipped_steps if saves else 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        assert self._bad is not None, "on_train_start comes first"
        self._attempts = self._plan.loss_scaler.attempts
        self._bad.remember(batch, batch_idx)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Handle a verdict of the engine, or a skip if batches are saved. Every rank calls it.

        The batch is run again, the bad one is saved if the plan saves, and an event is written. A
        verdict then rewinds or ends the run.

        Raises:
            NonFiniteError: the budget of skips is spent, and the plan does not rewind or has no
                checkpoint for it.
            LossScaleError: an overflow at the minimum loss scale, under ``at_min="raise"``.
        """
        scaler, engine, bad = self._plan.loss_scaler, self._plan.engine, self._bad
        if scaler.attempts == self._attempts:
            return  # the accumulation window is still open
        assert bad is not None, "on_train_start comes first"
        assert engine is not None
        verdict, before = (self._verdicts or [None])[0], self._skips
        self._verdicts.clear()
        if self.rule.save_batch:  # this syncs with the device, so only if it is needed
            self._skips = self._plan.skipped_steps
        if verdict is not None or self._skips > before:
            rewinds = verdict is not None and self._rewinds and verdict != AT_MIN
            counts, streak = scaler.counts(), scaler.streak
            bad.explain(
                action="rewind" if rewinds else "skip",
                in_a_row=max(streak, 1),
                scale=engine.loss_scale,
                scale_warmup=verdict is None and streak == 0,
                verdict=None if rewinds else verdict,
            )
            if rewinds:  # the checkpoint restored the loss scale, but counts of steps must continue
                scaler.load_counts(counts)
                engine.reset_skip_streak()
        bad.replayer.forget()


#: above this loss scale, even more than :data:`~lightning_mp.plan.diagnosis.SEARCH_SKIPS` overflows
#: in a row are ordinary
SEARCH_SCALE = 2.0**10


def has_bad_loss(reading: Reading) -> bool:
    """True if the loss is known, and not finite."""
    return not math.isfinite(reading.get(metric_names.LOSS) or 0.0)


class NonFiniteClassifier:
    """The distinction of ordinary overflows from problems, over the readings of a run.

    An overflow is not ordinary if more come in a row than a scaler needs to find its scale. A
    lasting problem is reported once.
    """

    #: the number of non-finite readings since the last finite one
    in_a_row = 0
    _reported = False

    def judge(self, reading: Reading, *, suppressed: bool) -> bool | None:
        """Return True if a non-finite step is an alert, False if it is an ordinary overflow.

        ``None`` is returned for a finite step, and for an alert that was reported already.
        ``suppressed`` is True for a step that the caller skips itself. A finite step that something
        else skipped counts as non-finite.
        """
        bad_loss, scale = has_bad_loss(reading), reading[metric_names.LOSS_SCALE]
        finite = not bad_loss and math.isfinite(reading.get(metric_names.GRAD_NORM) or 0.0)
        if finite and (suppressed or not reading[SKIPPED]):
            self.in_a_row, self._reported = 0, False
            return None
        self.in_a_row += 1
        # A skipped step with finite measurements was changed by a hook after they were taken.
        lasts = self.in_a_row > SEARCH_SKIPS and (scale or 0.0) <= SEARCH_SCALE
        alert = finite or bad_loss or scale is None or reading[AT_FLOOR] or lasts
        if alert and self._reported:
            return None
        self._reported = alert
        return alert
