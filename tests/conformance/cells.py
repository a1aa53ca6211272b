"""One cell on one rank: the fits it is made of, and how it ended."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.model import CLIP, STEPS, Learner, batches
from conformance.observe import Observer, Run
from conformance.rows import ROWS, Row
from conformance.strategies import trainer_arguments

SAVED_AT = 12
#: in the fits with an overflow: how many batches, and which of them overflows on one rank
SHORT, BAD_STEP = 6, 2
INIT_SCALE, GROWTH_INTERVAL = 256.0, 8
#: on both sides of a comparison, so that fp16 rounds the same with and without a skipped step
STATIC_SCALE = 64.0


@dataclass
class Cell:
    """How a cell ended on one rank, and what its fits did."""

    rank: int
    runs: dict[str, Run] = field(default_factory=dict)
    #: "refused" or "FAILED" where it did not run to its end, and why
    word: str = ""
    reason: str = ""
    #: training steps begun in the fit that ended it
    steps_begun: int = 0


def run_cell(strategy: str, row: str, folder: str) -> Cell:
    """Every fit of a cell; a refusal or failure ends it and is written down."""
    cell = Cell(rank=int(os.environ.get("RANK", "0")))
    fits = _Fits(strategy, ROWS[row], Path(folder))
    try:
        for name in fits.names():
            Learner.steps_begun = 0
            cell.runs[name] = getattr(fits, name)()
    except Exception as error:
        cell.steps_begun = Learner.steps_begun
        early = not cell.runs and cell.steps_begun <= 1  # some optimizers show what they do in their first step only
        cell.word = "refused" if early and is_refusal(error) else "FAILED"
        cell.reason = str(error) if cell.word == "refused" else traceback.format_exc()
    return cell


def is_refusal(error: Exception) -> bool:
    """A message somebody wrote for a user; any other exception before the first step is a failure too."""
    from lightning_mp import MissingExtraError, PlanError
    from lightning_mp.compat.lightning import MisconfigurationException

    said = (PlanError, MissingExtraError, MisconfigurationException, NotImplementedError)
    return isinstance(error, said) or (isinstance(error, RuntimeError) and "with ZeRO" in str(error))


class _Fits:
    """The fits of one cell, by name."""

    def __init__(self, strategy: str, row: Row, folder: Path) -> None:
        self.strategy, self.row, self.folder = strategy, row, folder
        self.checkpoint = folder / "step.ckpt"

    def names(self) -> list[str]:
        """In the order they run; the first one decides whether a cell is refused."""
        return ["main", "resumed", "overflow", "clean", *(["dynamic"] if self.row.policy.scaled else [])]

    def main(self) -> Run:
        """All steps, dtypes watched in the first two, the scale growing twice, saved on the way."""
        return self._fit(Observer(True, (self.checkpoint, SAVED_AT), whole=not self.row.declared))

    def resumed(self) -> Run:
        """From the checkpoint of ``main`` to its end."""
        return self._fit(Observer(), ckpt_path=self.checkpoint)

    def overflow(self) -> Run:
        """One rank alone has infinite gradients in one step."""
        return self._fit(Observer(), steps=SHORT, scale=self._static(), overflow_at=(BAD_STEP,))

    def clean(self) -> Run:
        """``overflow`` without that batch."""
        return self._fit(Observer(), steps=SHORT, without=(BAD_STEP,), scale=self._static())

    def dynamic(self) -> Run:
        """``overflow`` under a scale that moves."""
        return self._fit(Observer(), steps=SHORT, overflow_at=(BAD_STEP,))

    def _static(self) -> Any:
        from lightning_mp import LossScaling

        return LossScaling.static(STATIC_SCALE)

    def _fit(
        self,
        observer: Observer,
        *,
        steps: int = STEPS,
        without: tuple[int, ...] = (),
        scale: Any = None,
        overflow_at: tuple[int, ...] = (),
        ckpt_path: Path | None = None,
    ) -> Run:
        from lightning_mp import LossScaling
        from support.running import fit
        from support.saving import ResumableBatches

        plan = self.row.policy.plan(scale or LossScaling(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL))
        arguments = trainer_arguments(self.strategy, plan)
        module, data = Learner(self.row, overflow_at), ResumableBatches(batches(steps, without))
        try:
            fit(module, data=data, ckpt_path=ckpt_path, callbacks=[observer], gradient_clip_val=CLIP, **arguments)
        finally:
            observer.stop_watching()
        return observer.run
