"""What is written about a non-finite step: the event, the error, a likely cause and what to do."""

from __future__ import annotations

from typing import Any

from lightning_mp.errors import Fault, NonFiniteError
from lightning_mp.monitor.advice import pinning
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.nonfinite.replay import Diagnosis
from lightning_mp.numerics.nonfinite import Origin


def bad_step_event(
    diagnosis: Diagnosis,
    *,
    step: int,
    bad_loss: bool,
    action: str,
    in_a_row: int,
    allowed: int,
    scale: float | None,
    saved: str | None,
    under_plan: bool,
) -> Event:
    """The event of a step that was skipped and counts against the budget."""
    numbers: dict[str, Any] = {
        "role": None if diagnosis.origin is None else diagnosis.origin.role,
        "batch_idx": diagnosis.batch_idx,
        "skips_in_a_row": in_a_row,
        "allowed": allowed,
        "loss_scale": scale,
    }
    replay = "" if saved is None else f"; its batch is in {saved}"
    return Event(
        step=step,
        kind="nonfinite_loss" if bad_loss else "nonfinite_grad",
        severity="error" if action == "raise" else "warning",
        rank=diagnosis.rank,
        module=diagnosis.module,
        parameter=diagnosis.parameter,
        evidence={name: number for name, number in numbers.items() if number is not None},
        cause=_cause(diagnosis),
        advice=_advice(diagnosis.origin, bad_loss, under_plan) + replay,
        action=action,
    )


def overflow_event(diagnosis: Diagnosis, *, step: int, scale: float) -> Event:
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


def nonfinite_error(event: Event) -> NonFiniteError:
    """What the run ends with once ``event`` has used up the budget of skips."""
    what = "a non-finite loss" if event.kind == "nonfinite_loss" else "a non-finite gradient, from a finite loss,"
    rank = "" if event.rank is None else f" on rank {event.rank}"
    many, allowed = event.evidence["skips_in_a_row"], event.evidence["allowed"]
    fault = Fault(
        f"{what} at step {event.step}{rank}, {many} in a row{_place(event)}: {event.cause}",
        f"{allowed} in a row, as NonFiniteGuard(on_trip=..., max_consecutive=...) says",
        event.advice,
    )
    return _error(str(fault), event)


def nothing_to_rewind_to(event: Event) -> NonFiniteError:
    """A rewind before there is a checkpoint."""
    fault = Fault(
        f"a non-finite step {event.step} that is to be rewound before any checkpoint with finite weights was written"
        f"{_place(event)}: {event.cause}",
        "a checkpoint of the Trainer's ModelCheckpoint to go back to",
        "save earlier with ModelCheckpoint(every_n_train_steps=...)",
    )
    return _error(str(fault), event)


def _place(event: Event) -> str:
    """Where the value first appeared, as the middle of a sentence."""
    parameter = "" if event.parameter is None else f", parameter {event.parameter!r}"
    return "" if event.module is None else f", first in module {event.module!r}{parameter}"


def _error(message: str, event: Event) -> NonFiniteError:
    return NonFiniteError(message, rank=event.rank, step=event.step, module=event.module, parameter=event.parameter)


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
    if origin.input_bad:
        return _advice_on_input(origin, under_plan)
    if origin.phase == "loss":
        return "check the loss function and the targets"
    if origin.phase == "after backward":
        return "look at what changes gradients after the backward pass: hooks, and clipping of your own"
    first = "check its weights and lower the learning rate" if bad_loss else "clip gradients"
    if not origin.module:  # the root, which no pin covers
        return first
    return f"{first}; under half precision run it in fp32: {pinning([origin.module], under_plan=under_plan)}"


def _advice_on_input(origin: Origin, under_plan: bool) -> str:
    if origin.after is None:
        return "check the data of the batch"
    around = origin.module.rpartition(".")[0]
    first = "check the data of the batch; if it is finite, an operation overflows: under half precision"
    if not around:  # the root, which no pin covers
        return f"{first} cast to fp32 there"
    return f"{first} run {around!r} in fp32: {pinning([around], under_plan=under_plan)}"
