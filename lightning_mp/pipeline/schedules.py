"""torch's pipeline schedules, a store for their gradients, and the step engine under them."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from lightning_mp.compat.lightning import trainer_of
from lightning_mp.errors import PlanError
from lightning_mp.fsdp2.engine import sum_total_norms
from lightning_mp.numerics import grads
from lightning_mp.plan.engine import StepEngine

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
}
#: the schedules that run several stages on a rank
SEVERAL = ("interleaved_1f1b",)
#: makes the PlanError of the strategy from a problem and its fix
refused = partial(PlanError.of, subject="strategy")


class WatchedStage(PipelineStage):
    """A stage that knows when torch runs it on uninitialized memory, only to infer shapes.

    ``shapes_only`` is True in these runs. They leave buffers and random generators as they were.
    """

    shapes_only = False

    def _on_unset_numbers(self, prepare: str, *args: Any, **kwargs: Any) -> Any:
        before = [(buffer, buffer.detach().clone()) for buffer in self.submod.buffers()]
        drawn_from = [self.device] if self.device.type == "cuda" else []
        self.shapes_only = True
        # Uninitialized memory may be nan, which anomaly detection would report. Dropout must not
        # take random numbers from the real batch.
        try:
            with torch.autograd.set_detect_anomaly(False), torch.random.fork_rng(drawn_from):
                return getattr(super(), prepare)(*args, **kwargs)
        finally:
            self.shapes_only = False
            for buffer, value in before:  # a batch norm has counted these numbers as data
                buffer.data.copy_(value)

    _prepare_forward_infra: Any = partialmethod(_on_unset_numbers, "_prepare_forward_infra")
    _prepare_backward_infra: Any = partialmethod(_on_unset_numbers, "_prepare_backward_infra")


@dataclass(eq=False)
class StashedGradients:
    """A store for a schedule's gradients, because Lightning zeroes gradients before backward."""

    #: the parameters of the stages on this rank
    parameters: Sequence[nn.Parameter]
    #: True under FSDP2, which reduces the gradients of each batch before they are added up
    sharded: bool
    _gradients: list[Tensor | None] = field(default_factory=list[Tensor | None])

    @contextmanager
    def stashing(self, *, afresh: bool) -> Generator[None, None, None]:
        """Store the gradients of the schedule that runs in this context.

        ``afresh`` begins an accumulation window, and drops earlier gradients. They would take
        memory until Lightning zeroes them. Otherwise earlier gradients of the window are added to
        them. On exit the parameters have no gradient, or under FSDP2 the earlier one.
        """
        before = [None if afresh else parameter.grad for parameter in self.parameters]
        if afresh or self.sharded:
            for parameter in self.parameters:
                parameter.grad = None
        yield
        self._gradients = [parameter.grad for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient if self.sharded else None

    @contextmanager
    def untouched(self) -> Generator[None, None, None]:
        """Keep gradients through an evaluation inside an accumulation window.

        A new schedule of torch's would drop the gradients of shards.
        """
        before = [parameter.grad for parameter in self.parameters]
        yield
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient

    def loss(self, value: Tensor) -> Tensor:
        """Return a copy of ``value`` whose backward pass gives parameters the stored gradients."""
        leaf = value.detach().clone().requires_grad_()
        leaf.register_hook(self._restore)
        return leaf

    def _restore(self, _gradient: Tensor) -> None:
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self._gradients = [None] * len(self.parameters)


@torch.no_grad()
def average(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    """Average the gradients of trained ``parameters`` over their stage's replicas, in place.

    The all-reduce is in ``dtype``. Every rank of ``group`` must call it.

    Raises:
        PlanError: a trained parameter has no gradient.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    if len(gradients) < len(trained):
        given = "a trained parameter without a gradient, on replicas of a pipeline"
        raise refused(given, "freeze what is not used, or use data_parallel_size=1")
    if gradients:
        flat = torch.cat([gradient.to(dtype).flatten() for gradient in gradients])
        dist.all_reduce(flat.div_(group.size()), group=group)
        for gradient, piece in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))


class PipelineEngine(StepEngine):
    """The step engine of a rank that has the gradients of its own stages only.

    A step is skipped on all stages if a gradient of any stage is non-finite.
    """

    evaluates_once = "under pipeline parallelism, which would run the schedule again"
    steps = (("a stage", "a stage's parameters alone"), ("DTensors", "sharded parameters"))

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Set the optimizers. Then ``clip_grad_norm_`` clips by the norm over all stages."""
        super().connect(model, optimizers)
        if optimizers:
            self._connected.enter_context(sum_total_norms(self, self._stages))

    def _stages(self) -> grads.Groups:
        trainer: Any = trainer_of(self._module)
        return (trainer.strategy.stage_group,)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip gradients by their fp32 norm over all stages.

        Every rank of the pipeline must call it. ``last_norm`` is set to that norm.
        """
        parameters = grads.parameters_of(optimizer)
        own = grads.global_norm(parameters, self.device)
        self.last_norm = grads.over_shards(own, 2.0, self._stages())
        grads.clip_to_(parameters, max_norm, self.last_norm)
