"""Whether a step's loss and gradients are finite on every rank, and how the step is dropped where they are not."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_mp.compat.lightning import Trainer
from lightning_mp.compat.torch import waits_for_unscale
from lightning_mp.engines import optimizer_facts, reduce
from lightning_mp.errors import Faults
from lightning_mp.numerics import grads

#: at or below this scale an overflow is no search for the right one any more
FLOOR = 1.0


class GuardedStep(Protocol):
    """What the guard asks in the course of a step; every rank asks, and all get the same answers."""

    #: an engine decides and steps; it is known afterwards what it did
    steps_by_itself: bool

    def add_loss(self, loss: Tensor) -> None:
        """A backward pass is about to start from ``loss``."""
        ...

    def forget_losses(self) -> None:
        """What comes next is judged by its own losses."""
        ...

    def look(self, optimizer: Optimizer, *, drop: bool = False) -> tuple[bool, bool]:
        """Whether a loss and whether a gradient is not finite, on any rank; drops the step then, or on ``drop``."""
        ...

    def outcome(self) -> bool | None:
        """Whether an engine that steps by itself has skipped the step; asked again, or without a step, ``None``."""
        ...

    def scale(self) -> float | None:
        """The loss scale of the step looked at, ``None`` without one; a host read."""
        ...

    def release(self) -> None:
        """Give back what was changed."""
        ...


def guarded_step(trainer: Trainer, faults: Faults) -> GuardedStep:
    """What fits the Trainer's optimizers, which exist only once training starts.

    Raises:
        PlanError: an optimizer whose step nobody can leave out.
    """
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, Optimizer) and optimizer_facts.calls_closure_again(optimizer):
            faults.add(
                f"{type(optimizer).__name__}, which moves weights between two evaluations of its closure",
                "an optimizer whose step can be left out as a whole",
                "use AdamW or SGD, or MixedPrecisionPlan(nonfinite='skip'), which undoes such a step from a copy",
            )
        elif not isinstance(optimizer, Optimizer) and not hasattr(optimizer, "averaged_gradients"):
            faults.add(
                f"DeepSpeed's {type(optimizer).__name__}, whose gradients nobody else sees",
                "ZeRO stage 1, 2 or 3, or stage 0 in fp32",
                "use stage 1, or MixedPrecisionPlan with strategy='mp_deepspeed_zero1'",
            )
    faults.raise_if_any()
    zero = any(not isinstance(optimizer, Optimizer) for optimizer in trainer.optimizers)
    return ZeroStep(trainer) if zero else PlainStep(trainer)


class _Losses:
    """The losses of the open window, and one flag on the device for all of them."""

    def __init__(self, trainer: Trainer) -> None:
        self._distributed = trainer.world_size > 1
        self._device = trainer.strategy.root_device
        self._losses: list[Tensor] = []

    def add_loss(self, loss: Tensor) -> None:
        self._losses.append(loss.detach().sum())

    def forget_losses(self) -> None:
        self._losses.clear()

    def _flags(self) -> Tensor:
        """Two fp32 flags, of a bad loss and of a bad gradient."""
        flags = torch.zeros(2, dtype=torch.float32, device=self._device)
        if self._losses:
            flags[0] = (~torch.isfinite(torch.stack(self._losses))).any()
        return flags

    def _read(self, flags: Tensor) -> tuple[bool, bool]:
        """The maximum over ranks, on the host: the one read of a step."""
        if self._distributed:
            reduce.max_over_ranks_(flags)
        bad_loss, bad_gradient = flags.tolist()
        return bool(bad_loss), bool(bad_gradient)


class PlainStep(_Losses):
    """Gradients are where the optimizer finds them, whole or this rank's part; without any it changes nothing."""

    steps_by_itself = False

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scaler: Any = scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None
        self._one = torch.ones((), dtype=torch.float32, device=self._device)

    def look(self, optimizer: Optimizer, *, drop: bool = False) -> tuple[bool, bool]:
        flags = self._flags()
        members = grads.gradients(grads.parameters_of(optimizer))
        grads.unscale_and_check_(members, self._one, flags[1])
        found = self._read(flags)
        if drop or any(found):
            self._drop(optimizer)
        return found

    def _drop(self, optimizer: Optimizer) -> None:
        scaler = self._scaler
        if scaler is not None and waits_for_unscale(scaler, optimizer):
            scaler.unscale_(optimizer)  # a fused optimizer leaves that to its step, which would find nothing to judge
        grads.drop(optimizer)

    def outcome(self) -> bool | None:
        return None

    def scale(self) -> float | None:
        return None if self._scaler is None else float(self._scaler.get_scale())

    def release(self) -> None:
        self.forget_losses()


class ZeroStep(_Losses):
    """Gradients are in DeepSpeed's partitions: its own engine looks at them and skips, and is asked afterwards."""

    steps_by_itself = True

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._engine: Any = trainer.strategy.model
        self._zero: Any = trainer.optimizers[0]
        self._steps, self._scale = False, cast("float | None", None)
        self._before = getattr(self._zero, "check_grad_overflow", None)
        if self._before is not None:
            self._zero.check_grad_overflow = True  # bf16 is never asked otherwise

    def add_loss(self, loss: Tensor) -> None:
        """A loss that is not finite gives gradients that are not, which the engine sees; by itself 'inf' need not."""
        super().add_loss(loss)
        if loss.requires_grad:
            loss.register_hook(partial(torch.mul, loss.detach() * 0 + 1))

    def look(self, optimizer: Optimizer, *, drop: bool = False) -> tuple[bool, bool]:
        self._steps = bool(self._engine.is_gradient_accumulation_boundary())
        if self._steps and self._engine.fp16_enabled():
            self._scale = float(self._zero.loss_scale)
        return self._read(self._flags()) if self._steps else (False, False)

    def outcome(self) -> bool | None:
        steps, self._steps = self._steps, False
        return not self._engine.was_step_applied() if steps else None

    def scale(self) -> float | None:
        return self._scale

    def release(self) -> None:
        self.forget_losses()
        if self._before is not None:
            self._zero.check_grad_overflow = self._before
