"""What is done about an alert: log it, skip the step, or stop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_mp.compat.torch import waits_for_unscale
from lightning_mp.errors import Faults
from lightning_mp.numerics import grads
from lightning_mp.record.events import KINDS, Kind

Action = Literal["log", "skip", "stop"]
#: the one kind whose step can be left out; a plan or a NonFiniteGuard leaves out non-finite ones
SPIKE: Kind = "grad_norm_spike"


def parse(actions: Mapping[str, Action] | None, faults: Faults) -> dict[Kind, Action]:
    """The action for each kind of event that has one; unknown ones are noted in ``faults``."""
    for kind, given in (actions or {}).items():
        if kind not in KINDS:
            faults.unknown("kind of event", kind, KINDS)
        elif given == "skip" and kind != SPIKE:
            fix = f"'skip' works for {SPIKE}; for non-finite steps use a plan's nonfinite='skip', or NonFiniteGuard"
            faults.add(f"actions[{kind!r}]='skip'", fix=fix)
        faults.one_of(f"actions[{kind!r}]", given, get_args(Action), "use 'log'")
    return cast("dict[Kind, Action]", dict(actions or {}))


def suppress(optimizer: Optimizer, scaler: GradScaler | None) -> None:
    """Make the coming step do nothing: torch's optimizers skip a parameter without a gradient.

    ``scaler`` is torch's, if the run has one: a fused optimizer leaves unscaling to its step, which would find none.
    """
    if scaler is not None and waits_for_unscale(scaler, optimizer):
        scaler.unscale_(optimizer)
    grads.drop(optimizer)
