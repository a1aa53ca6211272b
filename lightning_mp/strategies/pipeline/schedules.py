"""What the module gives for a batch, and torch's schedules: one for training, one for each shape that is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.errors import PlanError
from lightning_mp.numerics.dtypes import tensors_in
from lightning_mp.strategies.pipeline.stages import Part


@dataclass(frozen=True, slots=True)
class Kind:
    """A schedule of torch's, whether it runs several stages on a rank, and which schedule evaluates like it."""

    torch: str
    several: bool = False
    evaluates: str = "ScheduleGPipe"


SCHEDULES = {
    "gpipe": Kind("ScheduleGPipe"),
    "1f1b": Kind("Schedule1F1B"),
    "interleaved_1f1b": Kind("ScheduleInterleaved1F1B", True, "ScheduleLoopedBFS"),
}


@dataclass(frozen=True, slots=True)
class Layout:
    """What was asked for: ``stages`` ranks a pipeline, each with ``per_rank`` stages."""

    schedule: str
    stages: int
    microbatches: int
    per_rank: int

    @property
    def count(self) -> int:
        """Stages in all, virtual ones included."""
        return self.stages * self.per_rank


class Batches:
    """Asks the module for what goes in and what comes out.

    Args:
        module: the user's.
        microbatches: pieces of a training batch.
        group: the stages of this replica, which must get the same batch.
        context: around the loss, as around the stages: the plan's.
    """

    def __init__(
        self, module: LightningModule, microbatches: int, group: dist.ProcessGroup, context: Callable[[], Any]
    ) -> None:
        self._module, self._microbatches, self._group, self._context = module, microbatches, group, context
        self._shapes: list[torch.Size] | None = None
        #: the epoch that batches are counted in, and how many came
        self._epoch: int | None = None
        self._drawn = 0

    def of(self, batch: Any, *, training: bool) -> tuple[tuple[Tensor, ...], Any]:
        """Inputs and target of a batch.

        Raises:
            PlanError: they are no tensors with rows, the rows do not divide, or the stages got different batches.
        """
        given: Any = self._module
        pair = given.pipeline_batch(batch)
        if not isinstance(pair, tuple) or len(cast("tuple[Any, ...]", pair)) != 2:
            raise refused(f"pipeline_batch, which returned {type(pair).__name__}", "return (inputs, target)")
        inputs, target = cast("tuple[Any, Any]", pair)
        inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        tensors: list[Tensor] = [*tensors_in(inputs), *tensors_in(target)]
        rows = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
        if len(rows) != 1 or not all(isinstance(one, Tensor) for one in inputs):
            given = f"pipeline_batch with tensors of {' and '.join(map(str, sorted(rows)))} rows"
            raise refused(given, "give every tensor the rows of the batch, or keep what has none in the module")
        if training:
            self._check_shapes(rows.pop(), [tensor.shape for tensor in cast("tuple[Tensor, ...]", inputs)])
        self._check_alike(tensors, self._module.trainer.current_epoch if training else -1)
        return inputs, target

    def _check_shapes(self, rows: int, shapes: list[torch.Size]) -> None:
        if rows % self._microbatches:
            raise refused(
                f"a batch of {rows} rows with microbatches={self._microbatches}",
                f"use a batch size that is a multiple of {self._microbatches}, with drop_last=True",
            )
        self._shapes = self._shapes or shapes
        if shapes != self._shapes:
            given = f"a batch of shape {[*map(tuple, shapes)]} after batches of {[*map(tuple, self._shapes)]}"
            raise refused(given, "pad to one length, and use DataLoader(drop_last=True)")

    def _check_alike(self, tensors: list[Tensor], epoch: int) -> None:
        """Compare batch 0, 1, 2, 4, 8, … of an epoch, with a device sync; all ranks of a replica refuse together."""
        if self._epoch != epoch:
            self._epoch, self._drawn = epoch, 0
        number, self._drawn = self._drawn, self._drawn + 1
        if number & (number - 1):
            return
        sums = torch.stack([_fingerprint(tensor) for tensor in tensors]).flatten()
        extremes = torch.cat([sums, -sums])
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        if not torch.equal(extremes[: len(sums)], -extremes[len(sums) :]):
            raise refused(
                "other batches on one stage than on another",
                "call seed_everything() before data is made, and give a sampler of your own num_replicas and rank of "
                "trainer.strategy.distributed_sampler_kwargs",
            )

    def loss(self, output: Any, target: Any) -> Tensor:
        """The module's ``pipeline_loss`` of a micro-batch.

        Raises:
            PlanError: it is no scalar with a gradient.
        """
        given: Any = self._module
        with self._context():
            loss = given.pipeline_loss(output, target)
        trains = any(one.requires_grad for one in tensors_in(output))
        if not isinstance(loss, Tensor) or loss.ndim or (trains and not loss.requires_grad):
            what = tuple(loss.shape) if isinstance(loss, Tensor) and loss.ndim else type(loss).__name__
            raise refused(
                f"pipeline_loss, which returned {what}",
                "return the mean over the rows of the micro-batch, computed from the output without detach() or item()",
            )
        return loss


class WatchedStage(PipelineStage):
    """A stage that says when torch only wants to see shapes: it then runs module and loss on unset numbers."""

    #: called with True before that, and with False after
    shapes_only: Callable[[bool], None]

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._quietly(super()._prepare_forward_infra, args, kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        return self._quietly(super()._prepare_backward_infra, args, kwargs)

    def _quietly(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        before = [(buffer, buffer.detach().clone()) for buffer in self.submod.buffers()]
        self.shapes_only(True)
        drawn_from = [self.device] if self.device.type == "cuda" else []
        try:  # what is unset may be nan, and what is dropped of it would be missing from the batch
            with torch.autograd.set_detect_anomaly(False), torch.random.fork_rng(drawn_from):
                return run(*args, **kwargs)
        finally:
            self.shapes_only(False)
            for buffer, value in before:  # a batch norm has seen what is no data
                buffer.data.copy_(value)


class Pipeline:
    """Runs batches through the stages of one replica.

    Args:
        layout: what was asked for.
        parts: the stages on this rank, by index.
        group: the ranks of the pipeline, in the order of their stages.
        device: where they compute.
        loss: an output and a target → the loss of a micro-batch.
        homes: the parameters of all stages, and the stage of each. Stages hand on the gradients that those need which
            are trained: when others are, a new schedule is made.
    """

    def __init__(
        self,
        layout: Layout,
        parts: dict[int, Part],
        group: dist.ProcessGroup,
        device: torch.device,
        loss: Callable[[Any, Any], Tensor],
        homes: Sequence[tuple[Tensor, int]],
    ) -> None:
        self.layout, self._parts, self._group, self._device = layout, parts, group, device
        self._loss, self._scaled, self._homes = loss, _as_it_is, homes
        self._shapes_only = False
        self._targets: Sequence[Any] = ()
        self._losses: list[Tensor] = []
        self._made: dict[Any, Any] = {}
        self._trained: tuple[bool, ...] = ()
        self.first = 0 in parts
        self.last = layout.count - 1 in parts

    def train(self, inputs: tuple[Tensor, ...], target: Any, scaled: Callable[[Tensor], Tensor]) -> Tensor:
        """Forward and backward of every micro-batch, from ``scaled(loss)``; the mean loss, on every rank."""
        self._scaled = scaled
        trained = tuple(parameter.requires_grad for parameter, _ in self._homes)
        if trained != self._trained:
            self._trained = trained
            self._made = {key: made for key, made in self._made.items() if key[0] != "step"}
        return self._run(inputs, target, self.layout.microbatches, "step")

    def evaluate(self, inputs: tuple[Tensor, ...], target: Any) -> Tensor:
        """Forward alone; the mean loss, on every rank; in one piece where the batch cannot be split evenly."""
        self._scaled = _as_it_is
        number = self.layout.microbatches if len(inputs[0]) % self.layout.microbatches == 0 else 1
        return self._run(inputs, target, number, "eval")

    def _run(self, inputs: tuple[Tensor, ...], target: Any, number: int, how: str) -> Tensor:
        key = (how, number, torch.is_inference_mode_enabled(), tuple(tensor.shape for tensor in inputs))
        if key not in self._made:
            self._made[key] = self._schedule(number, how)
        self._targets, self._losses = _split(target, number), []
        places = {"target": torch.arange(number)} if self.last else {}
        getattr(self._made[key], how)(*(inputs if self.first else ()), **places, return_outputs=False)
        self._targets = ()
        mean = torch.zeros((), dtype=torch.float32, device=self._device)
        if self.last:
            mean = torch.stack(self._losses).mean().to(mean)
        dist.broadcast(mean, src=dist.get_global_rank(self._group, self.layout.stages - 1), group=self._group)
        return mean

    def _schedule(self, number: int, how: str) -> Any:
        kind = SCHEDULES[self.layout.schedule]
        stages = [self._stage(index, part) for index, part in self._parts.items()]
        cls: Any = getattr(pipelining, kind.torch if how == "step" else kind.evaluates)
        given = stages if kind.several else stages[0]
        # the loss is divided before it is scaled: a loss scale times a sum overflows sooner than times a mean
        return cls(given, number, loss_fn=self._loss_of, scale_grads=False)

    def _stage(self, index: int, part: Part) -> WatchedStage:
        stage = WatchedStage(part, index, self.layout.count, self._device, group=self._group)
        stage.shapes_only = self._see_shapes
        return stage

    def _see_shapes(self, begins: bool) -> None:
        self._shapes_only = begins

    def _loss_of(self, output: Any, place: Tensor) -> Tensor:
        if self._shapes_only:
            return _any_loss(output)
        loss = self._loss(output, self._targets[int(place)])
        self._losses.append(loss.detach())
        return self._scaled(loss)


def _as_it_is(loss: Tensor) -> Tensor:
    return loss


def _any_loss(output: Any) -> Tensor:
    """A loss of every number of a stage's output, for its shapes alone."""
    floating = [one for one in tensors_in(output) if one.is_floating_point()]
    return torch.stack([one.float().square().sum() for one in floating]).sum()


def _split(value: Any, number: int) -> list[Any]:
    """``value`` cut into ``number`` equal pieces along the first dimension of every tensor in it."""
    if isinstance(value, Tensor):
        return list(value.split(len(value) // number))
    if isinstance(value, dict):
        members = cast("dict[Any, Any]", value)
        pieces = {key: _split(member, number) for key, member in members.items()}
        return [{key: pieces[key][place] for key in members} for place in range(number)]
    if isinstance(value, (list, tuple)):
        pieces = [_split(member, number) for member in cast("list[Any]", value)]
        return [type(value)(piece[place] for piece in pieces) for place in range(number)]  # pyright: ignore
    return [value] * number


def _fingerprint(tensor: Tensor) -> Tensor:
    """Two sums of a tensor that differ where two batches do."""
    numbers = tensor.detach().flatten().to(torch.float64 if tensor.device.type != "mps" else torch.float32)
    weights = torch.arange(1, len(numbers) + 1, device=numbers.device, dtype=numbers.dtype)
    return torch.nan_to_num(torch.stack([numbers.sum(), (numbers * weights).sum()]))


def refused(given: str, fix: str) -> PlanError:
    """The error of a batch, or of what the module made of it."""
    return PlanError.of(given, fix, "strategy")
