"""What is done about a bad step, by NonFiniteGuard and by a plan: explained, saved, written down, rewound."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mp.compat.lightning import (
    LightningModule,
    ModelCheckpoint,
    Trainer,
    checkpoint_connector,
    last_saved,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_mp.engines.base import max_over_ranks_
from lightning_mp.engines.diagnosis import Verdict, named
from lightning_mp.errors import Faults, NonFiniteError
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.nonfinite.events import bad_step, is_ordinary, overflow
from lightning_mp.monitor.nonfinite.replay import KeptBatch, Replayer
from lightning_mp.monitor.run_folder import BATCH_FILES, BATCHES
from lightning_mp.monitor.run_log import RunDir, end_run, open_folder
from lightning_mp.monitor.side_run import loss_of, step_output
from lightning_mp.numerics import nonfinite
from lightning_mp.numerics.dtypes import map_tensors
from lightning_mp.numerics.nonfinite import Origin
from lightning_mp.numerics.rng import set_rng_state

#: steps of a run whose batches are saved: the first ones say most
MAX_STEPS = 10


class BadSteps:
    """The bad steps of one run: run again, saved, written down and rewound; every rank makes the same calls.

    ``writer`` is who writes, for people; ``saves`` whether bad batches are saved, in
    ``<run folder>/nonfinite/step_000017_rank1.pt``, of at most ``MAX_STEPS`` steps a run; ``rewinds`` whether a
    checkpoint may have to be loaded; ``budget`` how the number of skips that are allowed is written without a plan.

    Raises:
        PlanError: another run, or a second ``writer`` of this one, is writing to the folder.
    """

    def __init__(
        self, trainer: Trainer, run_dir: RunDir, writer: str, *, rewinds: bool, saves: bool = True, budget: str = ""
    ) -> None:
        self._trainer, self._writer, self._rewinds, self._budget = trainer, writer, rewinds, budget
        self.events: list[Event] = []
        self._folder = folder = open_folder(trainer, run_dir, writer)
        before = [] if folder is None else list((folder.path / BATCHES).glob(BATCH_FILES))
        left = MAX_STEPS - len({path.name.rpartition("_")[0] for path in before}) if saves else 0
        # The first rank knows the folder; all have to agree on what will be written.
        path, self._left = trainer.strategy.broadcast(("" if folder is None else str(folder.path), left))
        self._saved_in = Path(path, BATCHES)
        self.replayer = Replayer()
        #: every checkpoint that was written
        self._checkpoints: set[str] = set()

    def remember(self, batch: Any, batch_idx: int) -> None:
        """A batch begins: keep a reference to it, and note what checkpoints there are."""
        self.replayer.remember(self._trainer, batch, batch_idx)
        if self._rewinds:
            self._note_checkpoints()

    def explain(
        self,
        module: LightningModule,
        *,
        step: int,
        action: str,
        in_a_row: int,
        allowed: int,
        scale: float | None,
        searching: bool,
        verdict: Verdict | None,
        bad_loss: bool | None = None,
        at_hand: Origin | None = None,
    ) -> None:
        """Run the batches of a skipped step again; save the bad one, write the event, print it, and rewind or raise.

        ``searching``: a finite loss then makes it an ordinary overflow, of which there is only an ``info`` event.
        ``bad_loss`` is whether the loss was non-finite, where that is known; ``at_hand`` is what the gradients said.

        Raises:
            NonFiniteError: ``verdict`` says why the run ends, or there is no checkpoint to rewind to.
            LossScaleError: it ends by an overflow at the minimum loss scale.
        """
        found = self.replayer.locate(self._trainer, module, at_hand)
        bad_loss = found.bad_loss if bad_loss is None else bad_loss
        if is_ordinary(scale, bad_loss, not searching):
            assert scale is not None
            self._write(overflow(found, step=step, scale=scale))
            return
        rank = "*" if found.rank is None else found.rank
        event = bad_step(
            found,
            step=step,
            bad_loss=bad_loss,
            severity="warning" if verdict is None else "error",
            action=action if verdict is None else "raise",
            evidence={"skips_in_a_row": in_a_row, "allowed": allowed, "loss_scale": scale},
            under_plan=not self._budget,
            saved=f"{BATCHES}/{_file_name(step, rank)}" if self._left > 0 else None,
        )
        self._save(self.replayer.kept(found.batch_idx), event)
        self._write(event)
        if verdict is not None:
            known: dict[str, Any] = {"step": step, "scale": scale} | ({"budget": self._budget} if self._budget else {})
            raise named(found.rank, found.origin, bad_loss, what=verdict.what, at_min=verdict.at_min, **known)
        if action == "rewind":
            self._rewind(event)

    def close(self, error: BaseException | None = None) -> None:
        """The run is over, or has failed."""
        self.replayer.forget()
        folder, self._folder = self._folder, None
        if folder is not None:
            end_run(folder, self._trainer, self._writer, error)

    def _write(self, event: Event) -> None:
        self.events.append(event)
        if self._folder is not None:
            self._folder.event(event)
        rank_zero_info(f"{self._writer}: {event}")

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
        values = {
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
            torch.save(values, path)
        except Exception as error:  # of a batch that cannot be pickled, or a full disk: the run is to go on
            rank_zero_warn(f"the bad batch of step {event.step} could not be saved: {type(error).__name__}: {error}")
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _note_checkpoints(self) -> None:
        for callback in _writers(self._trainer):  # one without ``monitor`` knows its last checkpoint only
            last = last_saved(callback)
            self._checkpoints |= {last, callback.best_model_path, callback.last_model_path, *callback.best_k_models}

    def _rewind(self, event: Event) -> None:
        """Load the newest checkpoint with finite weights: weights, optimizers, schedulers and the precision's state.

        ``trainer.global_step``, loops, data and callbacks continue from where they are.
        """
        self._note_checkpoints()
        trainer = self._trainer
        found = {path: Path(path).stat().st_mtime_ns for path in self._checkpoints if path and Path(path).exists()}
        newest_first = sorted(found, key=lambda path: found[path], reverse=True)
        for path in trainer.strategy.broadcast(newest_first):  # as the first rank sees it
            with checkpoint_connector(trainer) as connector:
                connector.resume_start(path, weights_only=False)  # this run has written it
                connector.restore_model()
                connector.restore_precision_plugin_state()
                connector.restore_optimizers_and_schedulers()
                connector.resume_end()
            bad = nonfinite.from_parameters(trainer.lightning_module) is not None
            flag = torch.full((), float(bad), dtype=torch.float32, device=trainer.strategy.root_device)
            if trainer.world_size > 1:
                max_over_ranks_(flag)
            if not flag.item():
                rank_zero_info(f"{self._writer}: loaded {path}, and continues after the batch of step {event.step}")
                return
        place = "" if event.module is None else f", first in module {event.module!r}"
        place += "" if event.parameter is None else f", parameter {event.parameter!r}"
        raise NonFiniteError(
            f"Step {event.step} was to be rewound, and no checkpoint with finite weights was written before it{place}: "
            f"{event.cause}. Save earlier with ModelCheckpoint(every_n_train_steps=...)",
            rank=event.rank,
            step=event.step,
            module=event.module,
            parameter=event.parameter,
        )


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
        faults.add(
            f"{given} without a ModelCheckpoint that saves optimizer states",
            "a checkpoint to go back to",
            f"add ModelCheckpoint(every_n_train_steps=...) to the callbacks, or use {instead}",
        )


def _writers(trainer: Trainer) -> list[ModelCheckpoint]:
    """The callbacks whose checkpoints hold more than weights."""
    found = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return [callback for callback in found if not callback.save_weights_only]
