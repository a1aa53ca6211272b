"""What runs a batch, torch's schedules on what the module gives for them, and the step on the gradients they leave."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.optim import Optimizer

from lightning_mp.compat.lightning import LightningModule, trainer_of
from lightning_mp.errors import PlanError
from lightning_mp.fsdp2.engine import sum_total_norms
from lightning_mp.modules.remote import is_remote
from lightning_mp.numerics import grads
from lightning_mp.numerics.dtypes import floating_in, map_tensors, tensors_in
from lightning_mp.pipeline.stages import Part
from lightning_mp.plan.alike import apart
from lightning_mp.plan.engine import StepEngine

SCHEDULES: dict[str, Any] = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
}
#: those that run several stages on a rank
SEVERAL = ("interleaved_1f1b",)
#: the error of a batch, or of what the module made of it, from what was given and what to do
refused = partial(PlanError.of, subject="strategy")


class WatchedStage(PipelineStage):
    """A stage that knows when torch only wants to see shapes: it then runs module and loss on unset numbers."""

    shapes_only = False

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_unset_numbers():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_unset_numbers():
            return super()._prepare_backward_infra(*args, **kwargs)

    @contextmanager
    def _on_unset_numbers(self) -> Generator[None, None, None]:
        before = [(buffer, buffer.detach().clone()) for buffer in self.submod.buffers()]
        drawn_from = [self.device] if self.device.type == "cuda" else []
        self.shapes_only = True
        try:  # what is unset may be nan, and what is dropped of it would be missing from the batch
            with torch.autograd.set_detect_anomaly(False), torch.random.fork_rng(drawn_from):
                yield
        finally:
            self.shapes_only = False
            for buffer, value in before:  # a batch norm has seen what is no data
                buffer.data.copy_(value)


@dataclass(eq=False, kw_only=True)
class Pipeline:
    """Runs batches through the stages of one replica; every rank gets the mean loss."""

    #: the user's, which says what goes in, what comes out, and the loss
    module: LightningModule
    #: a key of ``SCHEDULES``
    schedule: str
    #: the stages on this rank, by index
    parts: dict[int, Part]
    #: stages in all, virtual ones included
    count: int
    #: pieces of a training batch
    microbatches: int
    #: the ranks of the pipeline, in the order of their stages; all must get the same batch
    group: dist.ProcessGroup
    device: torch.device
    #: around the loss, as around the stages: the plan's
    context: Callable[[], Any]
    _scaled: Callable[[Tensor], Tensor] | None = None
    _shapes: list[torch.Size] | None = None
    #: the epoch whose first batch was compared, and whether it was one to train on
    _compared: tuple[int, bool] | None = None
    _targets: Sequence[Any] = ()
    _losses: list[Tensor] = field(default_factory=list[Tensor])
    _made: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def batch(self, batch: Any, *, training: bool) -> tuple[tuple[Tensor, ...], Any]:
        """Inputs and target of a batch, for which the stages are set to train or to evaluate as the module is."""
        for part in self.parts.values():
            part.train_own(self.module.training)
        pair = cast("Any", self.module).pipeline_batch(batch)
        if not isinstance(pair, tuple) or len(cast("tuple[Any, ...]", pair)) != 2:
            raise refused(f"pipeline_batch, which returned {type(pair).__name__}", "return (inputs, target)")
        inputs, target = cast("tuple[Any, Any]", pair)
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        tensors: list[Tensor] = [*tensors_in(inputs), *tensors_in(target)]
        rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
        if len(rows) != 1 or not all(isinstance(one, Tensor) for one in inputs):
            raise refused(
                f"pipeline_batch with tensors of {' and '.join(map(str, sorted(rows)))} rows",
                "give every tensor the rows of the batch, or keep what has none in the module",
            )
        if training:
            self._check_shapes(rows.pop(), [tensor.shape for tensor in cast("tuple[Tensor, ...]", inputs)])
        place = self.module.trainer.current_epoch, training
        if self._compared != place:
            self._compared = place
            # of whole numbers, so that no order of a sum is in it; a copy to the host once an epoch
            held = (tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
            if apart(map(crc32, held), self.device, self.group):
                raise refused(
                    "other batches on one stage than on another",
                    "call seed_everything() before data is made, and give a sampler of your own num_replicas and rank "
                    "of trainer.strategy.distributed_sampler_kwargs",
                )
        return inputs, target

    def _check_shapes(self, rows: int, shapes: list[torch.Size]) -> None:
        if rows % self.microbatches:
            raise refused(
                f"a batch of {rows} rows with microbatches={self.microbatches}",
                f"use a batch size that is a multiple of {self.microbatches}, with drop_last=True",
            )
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            given = f"a batch of shape {[*map(tuple, shapes)]} after batches of {[*map(tuple, self._shapes)]}"
            raise refused(given, "pad to one length, and use DataLoader(drop_last=True)")

    def train(self, inputs: tuple[Tensor, ...], target: Any, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward and backward of every micro-batch, from ``scaled(loss)``; the mean loss, on every rank."""
        self._scaled = scaled
        loss = self._run(inputs, target, self.microbatches, "step")
        for name, parameter in self.module.named_parameters():
            if is_remote(parameter) and parameter.grad is not None:
                raise refused(
                    f"a pipeline_loss or a stage that computes with {name!r}, which another stage holds",
                    "put what a loss adds for weights into the optimizer (weight_decay), or use strategy='mp_ddp'",
                )
        return loss

    def evaluate(self, inputs: tuple[Tensor, ...], target: Any) -> Tensor:
        """Forward alone; the mean loss, on every rank; in one piece where the batch cannot be split evenly."""
        self._scaled = None
        number = self.microbatches if len(inputs[0]) % self.microbatches == 0 else 1
        return self._run(inputs, target, number, "eval")

    def _run(self, inputs: tuple[Tensor, ...], target: Any, number: int, how: str) -> Tensor:
        # stages hand on the gradients that those need which are trained
        trained = tuple(parameter.requires_grad for parameter in self.module.parameters())
        key = how, number, torch.is_inference_mode_enabled(), tuple(tensor.shape for tensor in inputs), trained
        if key not in self._made:
            self._made[key] = self._new_schedule(number, how)
        last = self.count - 1 in self.parts
        self._targets = [map_tensors(target, lambda one, at=at: one.chunk(number)[at]) for at in range(number)]
        self._losses = []
        places = {"target": torch.arange(number)} if last else {}
        getattr(self._made[key], how)(*(inputs if 0 in self.parts else ()), **places, return_outputs=False)
        self._targets = ()
        mean = torch.zeros((), dtype=torch.float32, device=self.device)
        if last:
            mean = torch.stack(self._losses).mean().to(mean)
        dist.broadcast(mean, group_src=self.group.size() - 1, group=self.group)
        return mean

    def _new_schedule(self, number: int, how: str) -> Any:
        several, group = self.schedule in SEVERAL, self.group
        forward_only = pipelining.ScheduleLoopedBFS if several else pipelining.ScheduleGPipe
        schedule: Any = SCHEDULES[self.schedule] if how == "step" else forward_only
        stages = [WatchedStage(part, index, self.count, self.device, group=group) for index, part in self.parts.items()]
        # the loss is divided before it is scaled: a loss scale times a sum overflows sooner than times a mean
        loss_of = partial(self._loss_of, stages[-1])
        return schedule(stages if several else stages[0], number, loss_fn=loss_of, scale_grads=False)

    def _loss_of(self, stage: WatchedStage, output: Any, place: Tensor) -> Tensor:
        if stage.shapes_only:  # a loss of every number of the output
            return torch.stack([one.float().square().sum() for one in floating_in(output)]).sum()
        with self.context():
            loss = cast("Any", self.module).pipeline_loss(output, self._targets[int(place)])
        trains = any(one.requires_grad for one in tensors_in(output))
        if not isinstance(loss, Tensor) or loss.ndim or (trains and not loss.requires_grad):
            what = tuple(loss.shape) if isinstance(loss, Tensor) and loss.ndim else type(loss).__name__
            raise refused(
                f"pipeline_loss, which returned {what}",
                "return the mean over the rows of the micro-batch, computed from the output without detach() or item()",
            )
        self._losses.append(loss.detach())
        return loss if self._scaled is None else self._scaled(loss)


@dataclass(eq=False)
class StashedGradients:
    """Holds the gradients that a schedule left, while Lightning's loop sets all to zero between step and backward."""

    #: those of the stages on this rank
    parameters: Sequence[nn.Parameter]
    #: FSDP2 reduces the gradients of a batch at its end, before they are added to those of earlier batches
    sharded: bool
    _gradients: list[Tensor | None] = field(default_factory=list[Tensor | None])

    @contextmanager
    def stashing(self, *, afresh: bool) -> Generator[None, None, None]:
        """Around the schedule: ``afresh``, or on top of what earlier batches of the group left, as one process adds.

        Afresh, the last step's gradients go before Lightning sets them to zero: both at once would take twice the room.
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
        """Around an evaluation inside an accumulation window: a new schedule of torch's drops the shards' gradients."""
        before = [parameter.grad for parameter in self.parameters]
        yield
        for parameter, gradient in zip(self.parameters, before, strict=True):
            parameter.grad = gradient

    def loss(self, value: Tensor) -> Tensor:
        """``value``, with a backward pass that restores the stashed gradients."""
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
    """Average the gradients of trained ``parameters`` over the replicas of their stage, in ``dtype``, as DDP does."""
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
    """Carries a policy out where gradients are those of one stage; the flag is the maximum over all of them."""

    holds = "every process holds a stage of the layers"
    evaluates_once = "under pipeline parallelism, which would run the schedule again"
    steps = (("a stage", "a stage's parameters alone"), ("DTensors", "sharded parameters"))

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers; from then on ``clip_grad_norm_`` on a stage's gradients is by the norm of all."""
        super().connect(model, optimizers)
        if optimizers:
            self._connected.enter_context(sum_total_norms(self, self._stages))

    def _stages(self) -> grads.Groups:
        return (cast("Any", trainer_of(self._module)).strategy.stage_group,)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the norm over all stages, in fp32."""
        parameters = grads.parameters_of(optimizer)
        own = grads.global_norm(parameters, self.device)
        self.last_norm = grads.over_shards(own, 2.0, self._stages())
        grads.clip_to_(parameters, max_norm, self.last_norm)
