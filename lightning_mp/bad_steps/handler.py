"""What NonFiniteGuard and a plan do about a non-finite step: explain it, save its batch, write an event, rewind."""

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

#: steps of a run whose batches are saved: the first ones say most
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
    """The event of a step; numbers of ``evidence`` that are ``None`` are left out.

    ``ordinary``: of an overflow under loss scaling, after which the scaler skips the step and lowers the scale.
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
    """The non-finite steps of one run: they are explained, saved and rewound. Every rank makes the same calls.

    ``log`` takes the events; ``saves`` says whether bad batches are saved, in
    ``<run folder>/nonfinite/step_000017_rank1.pt``, of at most ``MAX_STEPS`` steps a run; ``rewinds`` whether a
    checkpoint may have to be loaded; ``budget`` is, without a plan, the argument that says how many skips are allowed.

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
        # The first rank knows the folder; all have to agree on what will be written.
        path, self._left = trainer.strategy.broadcast(("" if folder is None else str(folder.path), left))
        self._saved_in = Path(path, BATCHES)
        self.replayer, self._step = Replayer(), 0
        self._checkpoints = SavedByFit(trainer) if rewinds else None

    def remember(self, batch: Any, batch_idx: int) -> None:
        """A batch begins: keep a reference to it."""
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
        """Run the batches of a skipped step again; save the bad one, write the event, print it, and rewind or raise.

        ``scale_warmup``: a finite loss then makes it an ordinary overflow, of which there is only an ``info`` event.
        ``bad_loss`` is whether the loss was non-finite, where known; ``from_gradients`` is what the gradients said.

        Raises:
            NonFiniteError: ``verdict`` says why the run ends, or there is no checkpoint to rewind to.
            LossScaleError: it ends by an overflow at the minimum loss scale.
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
        """The run is over, or has failed."""
        self.replayer.forget()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._log.close(self._trainer, error)

    def _save(self, kept: KeptBatch | None, event: Event) -> None:
        """Write a batch on the rank that had it, on every rank if that is not known: a dict.

        ``batch`` (inputs and targets as ``training_step`` got them, on the CPU), ``batch_idx``, ``step``, ``rank``,
        ``accumulate`` (the micro-batches that a loss is divided by), ``rng`` (the generators before the forward),
        ``loss_scale``, ``event``. ``torch.load(weights_only=True)`` reads it where the batch is of tensors in plain
        containers.
        """
        rank = self._trainer.global_rank
        self._left -= 1
        if self._left < 0 or kept is None or event.rank not in (None, rank):
            return
        contents = {
            # cloned: a view would bring all it is a view of
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
        except Exception as error:  # of a batch that cannot be pickled, or a full disk: the run is to go on
            rank_zero_warn(f"the bad batch of step {event.step} could not be saved: {type(error).__name__}: {error}")
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _rewound(self) -> bool:
        """Load the newest checkpoint with finite weights: weights, optimizers, schedulers and the precision's state.

        Only a checkpoint that this fit saved, or the ``ckpt_path`` it resumed from, is loaded: reading it may run code
        of the file. ``trainer.global_step``, loops, data and callbacks continue from where they are. Every rank calls
        it. Returns False if there is no such checkpoint.

        Raises whatever ended a save that was under way.
        """
        assert self._checkpoints is not None, "a run that may rewind"
        trainer = self._trainer
        for path in self._checkpoints.newest_first():
            with checkpoint_connector(trainer) as connector:
                connector.resume_start(path, weights_only=False)  # of hyperparameters, too
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
    """The checkpoints with optimizer states that a fit saves, by whichever callback, and the one it resumed from.

    A ModelCheckpoint also names files that it was told of by a checkpoint. They are not among these.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        #: in the order of their last saving
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
        """Return the paths of those that are still there, as the first rank sees it, the newest first.

        Waits for a save that is under way, and raises whatever ended it. Every rank calls it.
        """
        finish_saving(self._trainer.strategy)
        there = [path for path in reversed(self._paths) if formats.exists(path)]
        return self._trainer.strategy.broadcast(there)

    def close(self) -> None:
        """Leave ``trainer.save_checkpoint`` as it was."""
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
    """Run a saved batch through ``module`` again: its loss, and where a non-finite value first appeared.

    ``module`` holds the weights to run with (the file has none), on the device to run on; ``context`` is what the run's
    precision computed in: ``torch.autocast("cuda", torch.bfloat16)`` for ``bf16-mixed``, ``nullcontext()`` for
    ``32-true``. The loss is as ``training_step`` returned it. Gradients stay in the parameters, as the step made them:
    divided by the number of its micro-batches, times the loss scale. The generators advance as in the step.
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
    """Add a fault if the Trainer writes no checkpoint to go back to, as ``given`` asks for."""
    if not _writers(trainer):
        what = f"{given} without a ModelCheckpoint that saves optimizer states"
        faults.add(what, fix=f"add ModelCheckpoint(every_n_train_steps=...) to the callbacks, or use {instead}")


def _writers(trainer: Trainer) -> list[ModelCheckpoint]:
    """The callbacks whose checkpoints hold more than weights."""
    callbacks = (callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint))
    return [callback for callback in callbacks if not callback.save_weights_only]


class BadStepCallback(WritesRun):
    """Under a plan that saves bad batches or rewinds: the first callback of the fit.

    The engine decides and skips steps. Where it would raise, it reports its verdict here instead: at the end of the
    batch, which is still in memory then, the batch is run again and saved, and the run is rewound or ends with the
    engine's error.
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
        """Become the Trainer's first callback."""
        callbacks_of(self._trainer).insert(0, self)

    def remove(self) -> None:
        """Be no callback any more, and close the folder."""
        callbacks = callbacks_of(self._trainer)
        if self in callbacks:
            callbacks.remove(self)
        self._release(self._trainer)

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        if self._bad is not None:
            self._bad.close(error)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the folder, and have verdicts reported here.

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
        """After a skip: save the batch, write an event; past the budget rewind, or end the run.

        Raises:
            NonFiniteError: the budget is spent and nothing is to be rewound, or no checkpoint can be.
            LossScaleError: an overflow at the minimum loss scale, under ``at_min="raise"``.
        """
        scaler, engine, bad = self._plan.loss_scaler, self._plan.engine, self._bad
        if scaler.attempts == self._attempts:
            return  # in the middle of an accumulation window
        assert bad is not None, "on_train_start comes first"
        assert engine is not None
        verdict, before = (self._verdicts or [None])[0], self._skips
        self._verdicts.clear()
        if self.rule.save_batch:  # a device sync, for which only saving has a use
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
            if rewinds:  # the loss scale goes back with the weights; the counts of the run go on
                scaler.load_counts(counts)
                engine.reset_skip_streak()
        bad.replayer.forget()


#: the scale that a search of :data:`~lightning_mp.plan.diagnosis.SEARCH_SKIPS` overflows leads to, or a higher one
SEARCH_SCALE = 2.0**10


def has_bad_loss(reading: Reading) -> bool:
    """Whether the loss is known, and not finite."""
    return not math.isfinite(reading.get(metric_names.LOSS) or 0.0)


class NonFiniteClassifier:
    """Tells ordinary overflows from problems.

    An overflow is no longer ordinary once more come in a row than the search for a scale needs. A problem that lasts is
    reported once.
    """

    #: non-finite readings without a finite one between them
    in_a_row = 0
    _reported = False

    def judge(self, reading: Reading, *, suppressed: bool) -> bool | None:
        """Whether a non-finite step is an alert; ``None`` for one that is finite, was reported, or was left out."""
        bad_loss, scale = has_bad_loss(reading), reading[metric_names.LOSS_SCALE]
        finite = not bad_loss and math.isfinite(reading.get(metric_names.GRAD_NORM) or 0.0)
        if finite and (suppressed or not reading[SKIPPED]):
            self.in_a_row, self._reported = 0, False
            return None
        self.in_a_row += 1
        # a step that was skipped though it was finite when it was measured was changed by a hook that came later
        lasts = self.in_a_row > SEARCH_SKIPS and (scale or 0.0) <= SEARCH_SCALE
        alert = finite or bad_loss or scale is None or reading[AT_FLOOR] or lasts
        if alert and self._reported:
            return None
        self._reported = alert
        return alert
