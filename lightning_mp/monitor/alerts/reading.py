"""The numbers of one step, as the rules see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The numbers of the optimizer step ``step``; ``None`` where one is not known: rules skip it.

    ``grad_norm`` is global, in true units, before clipping. ``loss_scale`` is the one after the step, and
    ``scale_at_floor`` says whether it can fall no further. ``skipped``: nothing was applied in this step.
    ``seconds`` is the time of one step, from which ``tokens_per_s`` and ``samples_per_s`` are computed.
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
