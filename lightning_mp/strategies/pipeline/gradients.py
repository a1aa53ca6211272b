"""Gradients of a schedule: kept aside until Lightning runs backward, then handed out; averaged over replicas before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mp.errors import Fault, PlanError


class Kept:
    """The gradients that a schedule left, while Lightning's loop sets all to zero between step and backward."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._before: list[Tensor | None] = []
        self._gradients: list[Tensor | None] = []

    @property
    def parameters(self) -> list[Tensor]:
        """Those of the stages on this rank that are trained."""
        return self._parameters

    def begin(self, *, afresh: bool) -> None:
        """Before the schedule: ``afresh``, or on top of what earlier batches of the group left, as one process adds."""
        self._before = [parameter.grad for parameter in self._parameters]
        if afresh:
            for parameter in self._parameters:
                parameter.grad = None

    def take(self, *, afresh: bool) -> None:
        """After the schedule: gradients are as before it, or gone where they are part of what was taken."""
        self._gradients = [parameter.grad for parameter in self._parameters]
        for parameter, before in zip(self._parameters, self._before, strict=True):
            parameter.grad = before if afresh else None
        self._before = []

    def loss(self, value: Tensor) -> Tensor:
        """``value``, with a backward pass that hands the gradients out."""
        handle = torch.zeros((), device=value.device, requires_grad=True)
        result: Any = _HandOut.apply(handle, value, self)
        return result

    def hand_out(self) -> None:
        """Give every parameter its gradient."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._gradients = []


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, value: Tensor, kept: Kept) -> Tensor:
        ctx.kept = kept
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.kept.hand_out()
        return torch.zeros_like(gradients[0]), None, None


class Replicas:
    """Averages gradients over the replicas of a stage, in ``dtype``, as DistributedDataParallel does."""

    def __init__(self, parameters: Sequence[Tensor], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        self._parameters, self._group, self._dtype = parameters, group, dtype
        self._used: list[bool] | None = None

    @torch.no_grad()
    def average(self) -> None:
        """Average every gradient that some replica has; the first call finds out which those are, with a host read.

        Raises:
            PlanError: a parameter that had no gradient on any replica in the first step has one now.
        """
        present = [parameter.grad is not None for parameter in self._parameters]
        if self._used is None:
            device = self._parameters[0].device if self._parameters else torch.device("cpu")
            flags = torch.tensor(present, dtype=torch.int32, device=device)
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
            self._used = [bool(flag) for flag in flags.tolist()]
        if any(here and not used for here, used in zip(present, self._used, strict=True)):
            raise PlanError([_USED_LATER], "strategy")
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


_USED_LATER = Fault(
    "a parameter that has its first gradient after the first step, on replicas of a pipeline",
    "parameters that are used from the first step on, or never",
    "freeze what is not used, or use data_parallel_size=1",
)
