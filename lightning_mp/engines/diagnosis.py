"""The error a run stops with: which rank, step, module and parameter the first non-finite value came from."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.compat.lightning import LightningModule, ParallelStrategy
from lightning_mp.errors import LossScaleError, NonFiniteError
from lightning_mp.modules import fp8
from lightning_mp.numerics import nonfinite
from lightning_mp.numerics.nonfinite import Origin

Found = tuple[Origin | None, bool]


@dataclass(frozen=True)
class Verdict:
    """Why a run ends; ``at_min``: an overflow where the loss scale can fall no lower."""

    what: str
    at_min: bool = False


BAD_LOSS = Verdict("the loss itself is not finite, which no loss scale can help (nonfinite='raise')")
AT_MIN = Verdict("overflow at the minimum loss scale (at_min='raise')", at_min=True)


def error(
    module: nn.Module,
    replay: Callable[[], Tensor | None] | None,
    *,
    what: str,
    step: int,
    loss: Tensor | None,
    scale: float | None,
    at_min: bool,
    distributed: bool,
) -> NonFiniteError:
    """Build the error, the same on every rank; it names the rank whose *own* loss or gradients were bad.

    ``replay`` runs the last batch forward and backward without summing gradients over ranks; ``step`` is the number of
    optimizer steps attempted so far.
    """
    bad_loss = loss is not None and not bool(torch.isfinite(loss).all())
    at_hand = fp8.with_role(
        module, nonfinite.from_gradients(module)
    )  # of which nothing is left once the batch is run again
    origin = fp8.with_role(module, nonfinite.locate(module, replay)) if replay is not None else None
    own_loss = bad_loss
    rank, (origin, bad_loss) = first_bad_rank((origin, own_loss), distributed=distributed)
    if origin is None:  # on every rank: no batch to run again, or nothing in it was bad by itself
        if at_hand is not None and replay is not None and not bad_loss:
            at_hand = replace(at_hand, phase="after backward", role=None)
        rank, (origin, bad_loss) = first_bad_rank((at_hand, own_loss), distributed=distributed)
    return named(rank, origin, bad_loss, what=what, step=step, scale=scale, at_min=at_min)


def named(
    rank: int | None,
    origin: Origin | None,
    bad_loss: bool,
    *,
    what: str,
    step: int,
    scale: float | None,
    at_min: bool,
    budget: str = "nonfinite=NonFinite(max_consecutive=...)",
) -> NonFiniteError:
    """The error, of what is known already; ``budget`` is how the number of skips that are allowed is written."""
    if origin is None:
        place = "no module could be named: the batch is gone or did not reproduce it"
    else:
        place = f"first seen in {origin}"
    state = "the loss was non-finite already before it was scaled" if bad_loss else "the loss was finite"
    scaled = "" if scale is None else f", loss scale {scale:g}"
    where = "" if rank is None else f" on rank {rank}"
    message = (
        f"Non-finite values in step {step}{where}: {what}; {place}; {state}{scaled}. "
        f"Allowed: finite losses and gradients, or skips within the budget of {budget}. "
        f"{_advice(origin, bad_loss, scale)}."
    )
    kind = LossScaleError if at_min else NonFiniteError
    return kind(
        message,
        rank=rank,
        step=step,
        module=None if origin is None else origin.module,
        parameter=None if origin is None else origin.parameter,
    )


def first_bad_rank(mine: Found, *, distributed: bool) -> tuple[int | None, Found]:
    """The rank whose *own* loss or gradients were bad and what it found, the same on every rank; every rank calls it.

    ``None`` and ``(None, False)`` where none of several found anything.
    """
    if not distributed:
        return 0, mine
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    # A non-finite loss is a rank's own fault; a gradient seen without a replay may have come from a sum over ranks.
    for rank, found in sorted(enumerate(everyone), key=lambda item: not item[1][1]):
        if found[0] is not None or found[1]:
            return rank, found
    return None, (None, False)


def _advice(origin: Origin | None, bad_loss: bool, scale: float | None) -> str:
    if bad_loss:
        return "Look at that module's input and weights, and at the batch: no loss scale makes a non-finite loss finite"
    if origin is not None and origin.phase == "after backward":
        return "Look at what changes gradients after the backward pass: hooks, and clipping of your own"
    # The root module cannot be pinned, and where none could be named there is nothing to write.
    named = origin is not None and origin.module
    lower = f"Pin that module (pins={{{named!r}: 'fp32'}}, before any other pin), lower" if named else "Lower"
    instead = "clip gradients" if scale is None else "use 'bf16-mixed', without loss_scaling"
    return f"{lower} the learning rate, or {instead}"


def run_again(optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any]) -> Tensor | None:
    """The last batch again, forward and backward, this rank's gradients alone."""
    optimizer.zero_grad()
    strategy = model.trainer.strategy
    with strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext():
        return closure()
