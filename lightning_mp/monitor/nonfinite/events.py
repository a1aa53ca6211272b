"""The events of non-finite steps: which overflow is ordinary, what is likely to be the cause, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_mp.monitor.alerts import Reading
from lightning_mp.monitor.events import Event, Severity, pinning
from lightning_mp.monitor.nonfinite.replay import Diagnosis
from lightning_mp.numerics.nonfinite import Origin


def is_ordinary(scale: float | None, bad_loss: bool, at_floor: bool) -> bool:
    """Whether a non-finite gradient is the scaler's search for a loss scale: of a finite loss, above the floor."""
    return scale is not None and not bad_loss and not at_floor


def bad_step(
    diagnosis: Diagnosis,
    *,
    step: int,
    bad_loss: bool,
    severity: Severity,
    action: str,
    evidence: Mapping[str, Any],
    under_plan: bool,
    saved: str | None = None,
) -> Event:
    """The event of a step that is no ordinary overflow; numbers of ``evidence`` that are ``None`` are left out."""
    known = {"role": diagnosis.origin and diagnosis.origin.role, "batch_idx": diagnosis.batch_idx, **evidence}
    advice = _advice(diagnosis.origin, bad_loss, under_plan)
    return Event(
        step=step,
        kind="nonfinite_loss" if bad_loss else "nonfinite_grad",
        severity=severity,
        rank=diagnosis.rank,
        module=diagnosis.module,
        parameter=diagnosis.parameter,
        evidence={name: number for name, number in known.items() if number is not None},
        cause=_cause(diagnosis),
        advice=advice if saved is None else f"{advice}; its batch is in {saved}",
        action=action,
    )


def overflow(diagnosis: Diagnosis, *, step: int, scale: float) -> Event:
    """The event of an ordinary overflow under loss scaling: the scaler skips the step and lowers the scale."""
    return Event(
        step=step,
        kind="nonfinite_grad",
        severity="info",
        rank=diagnosis.rank,
        module=diagnosis.module,
        parameter=diagnosis.parameter,
        evidence={"loss_scale": scale},
        cause="the loss scale has become too large; the scaler lowers it",
        action="skip",
    )


def _cause(diagnosis: Diagnosis) -> str:
    origin = diagnosis.origin
    if origin is None:
        return diagnosis.note or "the value did not appear again when the batch was run again"
    if diagnosis.note is not None:
        return f"seen in weights and gradients only ({diagnosis.note})"
    if origin.input_bad:
        between = "" if origin.after is None else f", or an operation between module {origin.after!r} and that one"
        return f"the batch{between}: the input of that module was non-finite already"
    return {
        "forward": "the output of that module, from finite inputs: a non-finite weight, or an overflow",
        "loss": "the loss, from finite outputs: a logarithm or a division in it",
        "after backward": "that gradient was changed after the backward pass, which was finite when the batch was run "
        "again: by a hook, a clip or the sum over ranks",
        "backward": "the backward pass of that module, from finite gradients: an overflow, or a division",
    }[origin.phase]


def _advice(origin: Origin | None, bad_loss: bool, under_plan: bool) -> str:
    if origin is None:
        return "lower the learning rate, or clip gradients"
    if origin.phase == "loss":
        return "check the loss function and the targets"
    if origin.phase == "after backward":
        return "look at what changes gradients after the backward pass: hooks, and clipping of your own"
    if origin.input_bad and origin.after is None:
        return "check the data of the batch"
    if origin.input_bad:
        first = "check the data of the batch; if it is finite, an operation overflows"
        module = origin.module.rpartition(".")[0]
    else:
        first = "check its weights and lower the learning rate" if bad_loss else "clip gradients"
        module = origin.module
    if not module:  # the root, which no pin covers
        return f"{first}: cast to fp32 there" if origin.input_bad else first
    return f"{first}; under half precision run {module!r} in fp32: {pinning([module], under_plan=under_plan)}"


# ---------------------------------------------------------------------- by readings, without a guard

#: A scale that is being searched for overflows this many times in a row at most, from torch's 65,536 on (measured on
#: small GPT-2 and MLP runs), and is found above the scale which that leads to.
SEARCH_SKIPS, SEARCH_SCALE = 5, 2.0**10
#: Once so many steps were applied the scale is known; so many overflows in a row are then no search any more.
FOUND_AFTER, FOUND_SKIPS = 10, 3


def has_bad_loss(reading: Reading) -> bool:
    """Whether the loss is known, and not finite."""
    return not math.isfinite(reading.loss or 0.0)


class NonFiniteClassifier:
    """Tells ordinary overflows from problems.

    An overflow is no longer ordinary once more come in a row than the search for a scale needs. A problem that lasts is
    reported once.
    """

    def __init__(self) -> None:
        self.in_a_row = self._applied = 0
        self._reported = False

    def judge(self, reading: Reading, *, changed: bool = False) -> bool | None:
        """Whether a non-finite step is an alert; ``None`` where it is finite, or was reported.

        ``changed``: its gradients became non-finite once measured.
        """
        if not (changed or has_bad_loss(reading) or not math.isfinite(reading.grad_norm or 0.0)):
            self._applied += not reading.skipped
            self.in_a_row, self._reported = 0, False
            return None
        self.in_a_row = max(self.in_a_row + 1, reading.skips_in_a_row)
        scale = reading.loss_scale
        alert = changed or not is_ordinary(scale, has_bad_loss(reading), reading.scale_at_floor)
        alert = alert or self._too_many(scale or 0.0)
        if alert and self._reported:
            return None
        self._reported = alert
        return alert

    def _too_many(self, scale: float) -> bool:
        if self._applied >= FOUND_AFTER:
            return self.in_a_row >= FOUND_SKIPS
        return self.in_a_row > SEARCH_SKIPS and scale <= SEARCH_SCALE
