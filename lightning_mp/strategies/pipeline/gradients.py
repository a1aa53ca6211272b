"""Gradients of a schedule: averaged over replicas, and stashed until Lightning runs backward."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.errors import PlanError


class StashedGradients:
    """Holds the gradients that a schedule left, while Lightning's loop sets all to zero between step and backward.

    Args:
        parameters: those of the stages on this rank.
        sharded: FSDP2 reduces the gradients of a batch at its end, before they are added to those of earlier batches.
    """

    def __init__(self, parameters: Sequence[Tensor], *, sharded: bool = False) -> None:
        self._parameters, self._sharded = list(parameters), sharded
        self._before: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []

    def begin(self, *, afresh: bool) -> None:
        """Before the schedule: ``afresh``, or on top of what earlier batches of the group left, as one process adds.

        Afresh, the last step's gradients go before Lightning sets them to zero: both at once would take twice the room.
        """
        self._before = [None if afresh else parameter.grad for parameter in self._parameters]
        if afresh or self._sharded:
            for parameter in self._parameters:
                parameter.grad = None

    def stash(self) -> None:
        """After the schedule: gradients are as before it, or None where they are part of what was stashed."""
        self._gradients = [parameter.grad for parameter in self._parameters]
        for parameter, before in zip(self._parameters, self._before, strict=True):
            parameter.grad = before if self._sharded else None
        self._before = []

    @contextmanager
    def untouched(self) -> Generator[None, None, None]:
        """Around an evaluation inside an accumulation window: a new schedule of torch's drops the shards' gradients."""
        before = [parameter.grad for parameter in self._parameters]
        yield
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient

    def loss(self, value: Tensor) -> Tensor:
        """``value``, with a backward pass that restores the stashed gradients."""
        handle = torch.zeros((), device=value.device, requires_grad=True)
        result: Any = _Restore.apply(handle, value, self)
        return result

    def restore(self) -> None:
        """Add to every parameter's gradient what was stashed of it."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._gradients = []


class _Restore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, value: Tensor, stashed: StashedGradients) -> Tensor:
        ctx.stashed = stashed
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.stashed.restore()
        return torch.zeros_like(gradients[0]), None, None


def refuse_remote_gradients(remote: Mapping[str, Tensor]) -> None:
    """After a schedule.

    Raises:
        PlanError: a loss or a stage used a ``remote`` stage's parameter, by name, whose numbers are not here.
    """
    name = next((name for name, parameter in remote.items() if parameter.grad is not None), None)
    if name is not None:
        raise PlanError.of(
            f"a pipeline_loss or a stage that computes with {name!r}, which another stage holds",
            "put what a loss adds for weights into the optimizer (weight_decay), or use strategy='mp_ddp'",
            "strategy",
        )


class Replicas:
    """Averages gradients over the replicas of a stage, in ``dtype``, as DistributedDataParallel does."""

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._parameters, self._group, self._dtype = parameters, group, dtype
        self._trained: list[bool] = []
        self._used: list[bool] = []

    @torch.no_grad()
    def average(self) -> None:
        """Average every gradient that some replica has; which those are is found out once, with a device sync.

        It is found out again where other parameters are trained than before.

        Raises:
            PlanError: a parameter that had no gradient on any replica in the first step has one now.
        """
        present = [parameter.grad is not None for parameter in self._parameters]
        trained = [parameter.requires_grad for parameter in self._parameters]
        if self._trained != trained:
            self._trained = trained
            device = self._parameters[0].device if self._parameters else torch.device("cpu")
            flags = torch.tensor(present, dtype=torch.int32, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
            self._used = [bool(flag) for flag in flags.tolist()]
        if any(here and not used for here, used in zip(present, self._used, strict=True)):
            given = "a parameter that has its first gradient after the first step, on replicas of a pipeline"
            raise PlanError.of(given, "freeze what is not used, or use data_parallel_size=1", "strategy")
        chosen = [p for p, used in zip(self._parameters, self._used, strict=True) if used]
        if not chosen:
            return
        for parameter in chosen:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in chosen if parameter.grad is not None]
        flat = torch.cat([gradient.to(self._dtype).flatten() for gradient in gradients])
        dist.all_reduce(flat.div_(self._group.size()), group=self._group)
        for gradient, piece in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))
