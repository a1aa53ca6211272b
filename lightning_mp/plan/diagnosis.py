"""``Diagnosis``, the origin of non-finite values, and the errors that end a run because of them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.compat.deepspeed import is_partitioned, local_gradient
from lightning_mp.compat.lightning import LightningModule, ParallelStrategy
from lightning_mp.compat.torch_sharding import unsummed_gradients
from lightning_mp.errors import LossScaleError, NonFiniteError, pinning
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics import nonfinite
from lightning_mp.numerics.nonfinite import Origin

#: the most overflows in a row before torch's initial scale of 65,536 has fallen far enough
#: (measured on small GPT-2 and MLP runs)
SEARCH_SKIPS = 5


_OVERFLOWS = "; if it is finite, an operation overflows after {!r}: cast to fp32 there, or pin the module around it"


#: the verdict of a run that ends by an overflow at the minimum loss scale
AT_MIN = "overflow at the minimum loss scale (at_min='raise')"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The origin of a non-finite value, the same on every rank. A field is ``None`` if unknown.

    Attributes:
        rank: the rank whose *own* loss or gradients were bad, before they were reduced.
        origin: the module, the parameter and the pass.
        bad_loss: True if the rank's loss was non-finite.
        batch_idx: the batch, under gradient accumulation the first bad one of the window.
        note: the reason why the batch did not show the origin, if there is one.
    """

    rank: int | None = None
    origin: Origin | None = None
    bad_loss: bool = False
    batch_idx: int | None = None
    note: str | None = None

    @property
    def module(self) -> str | None:
        """Return the origin's module, or ``None``."""
        return None if self.origin is None else self.origin.module

    @property
    def parameter(self) -> str | None:
        """Return the origin's parameter, or ``None``."""
        return None if self.origin is None else self.origin.parameter

    @property
    def cause(self) -> str:
        """Return the likely cause, in words."""
        if self.origin is None:
            return self.note or "the value did not appear again when the batch was run again"
        return self.origin.cause if self.note is None else f"seen in weights and gradients only ({self.note})"

    def advice(self, bad_loss: bool, *, under_plan: bool) -> str:
        """Return the advice for the user. It names a plan's fields if ``under_plan``."""
        origin = self.origin
        if origin is None:
            return "lower the learning rate, or clip gradients"
        if origin.phase == "loss":
            return "check the loss function and the targets"
        if origin.phase == "after backward":
            first = "look at what changes gradients after the backward pass: hooks, and clipping of your own"
        elif origin.input_bad:
            return "check the data of the batch" + ("" if origin.after is None else _OVERFLOWS.format(origin.after))
        else:
            first = "check its weights and lower the learning rate" if bad_loss else "clip gradients"
        if not origin.module:  # the root, which no pin covers
            return first
        pin = pinning([origin.module], under_plan=under_plan)
        return f"{first}; under half precision run {origin.module!r} in fp32: {pin}"

    def error(
        self,
        verdict: str,
        *,
        bad_loss: bool,
        step: int,
        scale: float | None,
        budget: str = "nonfinite=NonFinite(max_consecutive=...)",
    ) -> NonFiniteError:
        """Return the error that ends the run. It is not raised.

        It is LossScaleError if ``verdict`` is ``AT_MIN``, else NonFiniteError.

        Args:
            verdict: the reason why the run ends.
            bad_loss: the loss was non-finite.
            step: the number of the step.
            scale: the loss scale, or ``None`` without loss scaling.
            budget: the argument with the number of allowed skips, as the message shows it. If it
                begins with ``nonfinite``, the advice names a plan's fields.
        """
        lost = "no module could be named: the batch is gone or did not reproduce it"
        place = lost if self.origin is None else f"first seen in {self.origin}"
        state = "the loss was non-finite already before it was scaled" if bad_loss else "the loss was finite"
        scaled = "" if scale is None else f", loss scale {scale:g}"
        where = "" if self.rank is None else f" on rank {self.rank}"
        advice = self.advice(bad_loss, under_plan=budget.startswith("nonfinite"))
        kind = LossScaleError if verdict == AT_MIN else NonFiniteError
        return kind(
            f"Non-finite values in step {step}{where}: {verdict}; {place}; {state}{scaled}. Allowed: finite "
            f"losses and gradients, or skips within the budget of {budget}. {advice[0].upper()}{advice[1:]}.",
            rank=self.rank,
            step=step,
            module=self.module,
            parameter=self.parameter,
        )


def error(
    module: nn.Module,
    replay: Callable[[], Tensor | None] | None,
    verdict: str,
    step: int,
    loss: Tensor | None,
    scale: float | None,
    *,
    distributed: bool,
) -> NonFiniteError:
    """Run the last batch again and return the error that ends the run, the same on every rank.

    Every rank must call it if ``distributed``. The replay changes gradients.

    Args:
        module: the module of the run.
        replay: runs the last batch forward and backward without reducing gradients. ``None``
            without a batch: only the gradients are then read.
        verdict: the reason why the run ends.
        step: the number of optimizer steps tried so far.
        loss: the last loss, or ``None``.
        scale: the loss scale, or ``None`` without loss scaling.
        distributed: compare the findings of all ranks.
    """
    bad_loss = loss is not None and not bool(torch.isfinite(loss).all())
    # before the replay, which changes the gradients
    from_gradients = named(nonfinite.from_gradients(module, _kept_gradient))
    origin = None if replay is None else named(nonfinite.locate(module, replay))
    diagnosis = first_bad_rank(origin, bad_loss, distributed=distributed)
    if diagnosis.origin is None:  # on all ranks: no replay, or a finite one
        if from_gradients is not None and replay is not None and not diagnosis.bad_loss:
            from_gradients = replace(from_gradients, phase="after backward")
        diagnosis = first_bad_rank(from_gradients, bad_loss, distributed=distributed)
    return diagnosis.error(verdict, bad_loss=diagnosis.bad_loss, step=step, scale=scale)


def applied_none(tried: int, scale: float | None, stop: str = "nonfinite='raise'") -> NonFiniteError:
    """Return the error of a run that skipped all of its ``tried`` optimizer steps.

    ``scale`` is the last loss scale, ``None`` without loss scaling. ``stop`` is the argument that
    would end such a run at its first skipped step.
    """
    scaled = "" if scale is None else f"; the loss scale ended at {scale:g}"
    return NonFiniteError(
        f"The run applied 0 of its {tried} optimizer steps: each was skipped, as a gradient was not finite{scaled}. "
        f"The weights are those it began with. {stop} stops at the first such step and names its module"
    )


def _kept_gradient(parameter: Any) -> Tensor | None:
    """Return the gradient of a parameter after a skipped step, or ``None``.

    ZeRO-3 keeps reduced gradients until the next backward pass. ZeRO-1 and 2 drop them in a skipped
    step.
    """
    return local_gradient(parameter) if is_partitioned(parameter) else parameter.grad


def named(origin: Origin | None) -> Origin | None:
    """Return ``origin`` under names without wrappers (``_orig_mod.``); ``None`` for ``None``."""
    if origin is None:
        return None
    parameter = None if origin.parameter is None else plain_name(origin.parameter)
    return replace(origin, module=plain_name(origin.module), parameter=parameter)


def first_bad_rank(origin: Origin | None, bad_loss: bool, *, distributed: bool) -> Diagnosis:
    """Return the finding of the first rank with a non-finite loss, else the first with an origin.

    If no rank has either, return an empty Diagnosis. If ``distributed``, this is a collective:
    every rank must call it. Otherwise the arguments are returned as the finding of rank 0.
    """
    if not distributed:
        return Diagnosis(0, origin, bad_loss)
    everyone = [(origin, bad_loss)] * dist.get_world_size()
    dist.all_gather_object(everyone, (origin, bad_loss))
    # A non-finite loss is the rank's own. A gradient may be non-finite because it was reduced.
    bad = [(rank, *found) for rank, found in enumerate(everyone) if any(found)]
    return Diagnosis(*min(bad, key=lambda one: not one[2])) if bad else Diagnosis()


def run_again(optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any]) -> Tensor | None:
    """Run the last batch again, forward and backward, and return the loss from ``closure``.

    Gradients are dropped before and are not reduced, so they are this rank's own.
    """
    optimizer.zero_grad()
    strategy = model.trainer.strategy
    unsynced = strategy.block_backward_sync() if isinstance(strategy, ParallelStrategy) else nullcontext()
    with unsummed_gradients(model), unsynced:
        return closure()
