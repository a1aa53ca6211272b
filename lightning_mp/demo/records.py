"""What a mode says while it trains and when it is done."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_mp.demo.shapes import Shape

# Steps in which allocators and kernels find their pace; they are left out of the median.
WARM_UP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Job:
    """All that one mode's training depends on, apart from the tokens. ``device`` is ``"cpu"`` or ``"cuda"``."""

    mode: str
    shape: Shape
    steps: int
    seed: int
    device: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Reading:
    """One training step, an overflowed one included.

    ``loss`` is unscaled; ``scale`` is the loss scale after the step, ``None`` without loss scaling; ``skipped`` counts
    skipped steps so far; ``lr`` is the rate the step used; ``seconds`` is wall time, the loss's reading included.
    """

    step: int
    loss: float
    scale: float | None
    skipped: int
    lr: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    """What one mode gave.

    ``step_ms`` is a median; ``compute_dtype`` is what a matrix product was seen to return, ``peak_mib`` the most that
    tensors held at once in an optimizer step.
    ``data_crc`` and ``init_crc`` are checksums of the batches and of the initial weights: equal in every mode.
    """

    mode: str
    compute_dtype: str
    step_ms: float
    tokens_per_s: float
    peak_mib: float
    val_loss: float
    skipped: int
    final_scale: float | None
    data_crc: int
    init_crc: int


@dataclass(frozen=True, slots=True)
class Failure:
    """A mode that stopped with an error: one line for the table, and the traceback for ``error.txt``."""

    reason: str
    details: str


@dataclass(frozen=True, slots=True)
class Row:
    """A mode in the report: a result, or the reason why there is none."""

    mode: str
    result: Result | None = None
    not_run: str | None = None
    failed: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values: ``mode``, ``status`` (``done``, ``not run``, ``failed``), ``reason``, the result's fields."""
        status = "done" if self.result else "failed" if self.failed else "not run"
        values = asdict(self.result) if self.result else {}
        return {"mode": self.mode, "status": status, "reason": self.failed or self.not_run, **values}
