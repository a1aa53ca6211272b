"""The numbers of one step, as the rules see them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Operand(NamedTuple):
    """Of one operand of an FP8 layer: the share of its values that were flushed to 0, of those that are not 0.

    ``scale`` is what ``amax``, the largest magnitude, is multiplied by; with a scale a row the smallest.
    """

    flushed: float
    amax: float
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The numbers of the optimizer step ``step``; ``None`` where one is not known: rules skip it.

    ``grad_norm`` is global, in true units, before clipping. ``loss_scale`` is the one after the step, and
    ``scale_at_floor`` says whether it can fall no further. ``skipped``: nothing was applied in this step.
    ``seconds`` is the time of one step, from which ``tokens_per_s`` and ``samples_per_s`` are computed. ``fp8`` are the
    operands of the layers that run in FP8, by layer and role (``input``, ``weight``, ``gradient``).
    """

    step: int
    loss: float | None = None
    grad_norm: float | None = None
    param_norm: float | None = None
    update_ratio: float | None = None
    lost_updates: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    skips_in_a_row: int = 0
    scale_at_floor: bool = False
    lr: float | None = None
    tokens_per_s: float | None = None
    samples_per_s: float | None = None
    seconds: float | None = None
    memory_gib: float | None = None
    fp8: Mapping[tuple[str, str], Operand] = field(default_factory=dict[tuple[str, str], Operand])
