"""A bad batch on disk: what ``training_step`` got, the generators' state before it, and how to run it again."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mp.compat.lightning import LightningModule, Trainer, rank_zero_warn
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.nonfinite.replay import Diagnosis, KeptBatch
from lightning_mp.monitor.run_folder import BATCH_FILES, BATCHES
from lightning_mp.monitor.side_run import loss_of, step_output
from lightning_mp.numerics import nonfinite
from lightning_mp.numerics.nested import map_tensors
from lightning_mp.numerics.nonfinite import Origin
from lightning_mp.numerics.rng import set_rng_state

#: steps of a run whose batches are saved: the first ones say most
MAX_STEPS = 10


class SavedBatches:
    """Writes bad batches to ``<run folder>/nonfinite/step_000017_rank1.pt``, of at most ``MAX_STEPS`` steps a run."""

    def __init__(self, trainer: Trainer, run_folder: Path | None) -> None:
        before = [] if run_folder is None else list((run_folder / BATCHES).glob(BATCH_FILES))
        left = MAX_STEPS - len({path.name.rpartition("_")[0] for path in before})
        # The first rank knows the folder; all have to agree on what will be written.
        place, self._left = trainer.strategy.broadcast((str(run_folder), left))
        self._folder, self._rank = Path(place, BATCHES), trainer.global_rank

    def next_name(self, diagnosis: Diagnosis, step: int) -> str | None:
        """What will be written, seen from the run folder, the same on every rank; ``None`` if nothing will."""
        if self._left <= 0:
            return None
        return f"{BATCHES}/{_name(step, '*' if diagnosis.rank is None else diagnosis.rank)}"

    def save(self, kept: KeptBatch | None, event: Event) -> None:
        """Write one on the rank that had it, on every rank if that is not known: a dict of tensors and plain values.

        ``batch`` (inputs and targets as ``training_step`` got them, on the CPU), ``batch_idx``, ``step``, ``rank``,
        ``rng`` (the generators before the forward), ``loss_scale``, ``event``. ``torch.load(weights_only=True)`` reads
        it where the batch is of tensors in plain containers.
        """
        self._left -= 1
        if self._left < 0 or kept is None or event.rank not in (None, self._rank):
            return
        values = {
            "batch": map_tensors(kept.batch, _on_cpu),
            "batch_idx": kept.batch_idx,
            "step": event.step,
            "rank": self._rank,
            "rng": kept.rng,
            "loss_scale": None if kept.scale is None else float(kept.scale),
            "event": event.to_dict(),
        }
        path = self._folder / _name(event.step, self._rank)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            torch.save(values, path)
        except Exception as error:  # of a batch that cannot be pickled, or a full disk: the run is to go on
            rank_zero_warn(f"the bad batch of step {event.step} could not be saved: {type(error).__name__}: {error}")
            path.unlink(missing_ok=True)


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
    ``32-true``. Gradients stay in the parameters, and the generators advance as in the step.
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
            (loss.float() * (saved["loss_scale"] or 1.0)).backward()
        return loss

    origin = nonfinite.locate(module, run)
    return (losses[0] if losses else None), origin


def _name(step: int, rank: int | str) -> str:
    return f"step_{step:06d}_rank{rank}.pt"


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone()  # a view would bring all it is a view of
