"""How a non-finite step is told: the event, the error, a likely cause and a next step."""

from __future__ import annotations

from torch.optim import Optimizer

from lightning_mp.errors import NonFiniteError
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.replay import Blame
from lightning_mp.numerics.nonfinite import Origin


def tripped(
    blame: Blame,
    *,
    step: int,
    bad_loss: bool,
    action: str,
    in_a_row: int,
    allowed: int,
    scale: float | None,
    saved: str | None,
) -> Event:
    """The event of a step that was dropped and counts against the budget."""
    numbers: dict[str, float | None] = {
        "batch_idx": blame.batch_idx,
        "skips_in_a_row": in_a_row,
        "allowed": allowed,
        "loss_scale": scale,
    }
    replay = "" if saved is None else f"; its batch is in {saved}"
    return Event(
        step=step,
        kind="nonfinite_loss" if bad_loss else "nonfinite_grad",
        severity="error" if action == "raise" else "warning",
        rank=blame.rank,
        module=blame.module,
        parameter=blame.parameter,
        evidence={name: number for name, number in numbers.items() if number is not None},
        cause=_cause(blame),
        advice=_advice(blame.origin, bad_loss) + replay,
        action=action,
    )


def overflow(blame: Blame, *, step: int, scale: float) -> Event:
    """The event of an ordinary overflow under loss scaling: the scaler skips the step and lowers the scale."""
    return Event(
        step=step,
        kind="nonfinite_grad",
        severity="info",
        rank=blame.rank,
        module=blame.module,
        parameter=blame.parameter,
        evidence={"loss_scale": scale},
        cause="the loss scale is too large by now; the scaler lowers it",
        action="skip",
    )


def error(event: Event) -> NonFiniteError:
    """What the run stops with."""
    rank = "" if event.rank is None else f"rank {event.rank}, "
    place = "no module could be named" if event.module is None else f"first seen in module {event.module!r}"
    parameter = "" if event.parameter is None else f", parameter {event.parameter!r}"
    many, allowed = event.evidence["skips_in_a_row"], event.evidence["allowed"]
    what = "the loss is not finite" if event.kind == "nonfinite_loss" else "a gradient is not finite, the loss is"
    message = (
        f"given {rank}step {event.step}: {what}, {many} in a row, {allowed} allowed; "
        f"{place}{parameter}: {event.cause}; "
        "allowed: finite losses and gradients, or skips within NonFiniteGuard(max_consecutive=...); "
        f"do: {event.advice}"
    )
    return _error(message, event)


def nothing_to_rewind_to(event: Event) -> NonFiniteError:
    """``on_trip="rewind"`` before there is a checkpoint."""
    return _error(
        f"given a non-finite step {event.step} and on_trip='rewind', and no checkpoint with finite weights was written "
        f"yet; first seen in module {event.module!r}: {event.cause}; allowed: a checkpoint of the Trainer's "
        "ModelCheckpoint to go back to; do: save earlier (every_n_train_steps=...), or use on_trip='skip'",
        event,
    )


def moved_already(optimizer: Optimizer, step: int) -> NonFiniteError:
    """An optimizer that evaluates its closure again met the value where it had moved the weights already."""
    return NonFiniteError(
        f"given step {step}: {type(optimizer).__name__} evaluated its closure again, and that is not finite; "
        "allowed: non-finite values in the first evaluation, before weights are moved; "
        "do: use an optimizer that evaluates once, or lower its step size",
        step=step,
    )


def _error(message: str, event: Event) -> NonFiniteError:
    return NonFiniteError(message, rank=event.rank, step=event.step, module=event.module, parameter=event.parameter)


def _cause(blame: Blame) -> str:
    origin = blame.origin
    if origin is None:
        return blame.note or "the value did not come again when the batch was run again"
    if blame.note is not None:
        return f"as far as weights and gradients tell ({blame.note})"
    if origin.input_bad:
        return "the batch: that module's input was non-finite already"
    return {
        "forward": "that module's output, from finite inputs: a non-finite weight, or an overflow",
        "loss": "the loss, from finite outputs: a logarithm or a division in it",
        "backward": "that module's backward pass, from finite gradients: an overflow, or a division",
    }[origin.phase]


def _advice(origin: Origin | None, bad_loss: bool) -> str:
    if origin is None:
        return "lower the learning rate, or clip gradients"
    if origin.input_bad:
        return "look at the batch's data"
    if origin.phase == "loss":
        return "look at the loss function and the targets"
    pin = f"in half precision, run it in fp32 (DtypePinning({{{origin.module!r}: 'fp32'}}))"
    return f"look at its weights and lower the learning rate; {pin}" if bad_loss else f"clip gradients; {pin}"
