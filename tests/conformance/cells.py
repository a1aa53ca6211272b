"""One cell on one rank: the fits it is made of, and how it ended."""

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
    rank: int
    runs: dict[str, Run] = field(default_factory=dict)
    #: "refused" or "FAILED" where it did not run to its end, and why
    word: str = ""
    reason: str = ""
    #: training steps begun in the fit that ended it
    steps_begun: int = 0


def run_cell(strategy: str, row: str, folder: str) -> Cell:
    cell = Cell(rank=int(os.environ.get("RANK", "0")))
    try:
        for name, options in _fits(ROWS[row], Path(folder) / "step.ckpt").items():
            Learner.steps_begun = 0
            cell.runs[name] = _fit(strategy, ROWS[row], **options)
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


def _fits(row: Row, checkpoint: Path) -> dict[str, dict[str, Any]]:
    """The fits of a cell in the order they run; the first one decides whether it is refused.

    ``main`` runs all steps, dtypes watched in the first two, the scale growing twice, and is saved on the way;
    ``resumed`` goes on from there. In ``overflow`` one rank alone has infinite gradients in one step, ``clean`` is the
    same without that batch, ``dynamic`` is ``overflow`` under a scale that moves.
    """
    from lightning_mp import LossScaling

    static, bad = {"steps": SHORT, "scale": LossScaling.static(STATIC_SCALE)}, {"overflow_at": (BAD_STEP,)}
    fits = {
        "main": {"observer": Observer(True, (checkpoint, SAVED_AT), whole=not row.declared)},
        "resumed": {"ckpt_path": checkpoint},
        "overflow": static | bad,
        "clean": {**static, "without": (BAD_STEP,)},
        "dynamic": {"steps": SHORT, **bad},
    }
    if row.by == "sam":  # no plan checks gradients that are taken twice
        return {name: fits[name] for name in ("main", "resumed")}
    return fits if row.policy.scaled else {name: fits[name] for name in fits if name != "dynamic"}


def _fit(
    strategy: str,
    row: Row,
    *,
    observer: Observer | None = None,
    steps: int = STEPS,
    without: tuple[int, ...] = (),
    scale: Any = None,
    overflow_at: tuple[int, ...] = (),
    ckpt_path: Path | None = None,
) -> Run:
    from lightning_mp import LossScaling
    from support.running import fit
    from support.saving import ResumableBatches

    observer = observer or Observer()
    plan = row.policy.plan(scale or LossScaling(init_scale=INIT_SCALE, growth_interval=GROWTH_INTERVAL))
    arguments = {"callbacks": [observer], "gradient_clip_val": CLIP, **trainer_arguments(strategy, plan)}
    if ckpt_path is not None and strategy == "single" and getattr(row, "by", "") == "adamw_8bit":
        arguments["strategy"] = "mp_auto"  # Lightning's own loads no optimizer state of torchao's
    try:
        data = ResumableBatches(batches(steps, without))
        fit(Learner(row, overflow_at), data=data, ckpt_path=ckpt_path, **arguments)
    finally:
        observer.stop_watching()
    return observer.run
