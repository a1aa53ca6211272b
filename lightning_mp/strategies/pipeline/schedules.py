"""torch's schedules: one for the training batches of a run, and one for each shape of batch that is evaluated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining

from lightning_mp.compat.torch_pipelining import WatchedStage
from lightning_mp.strategies.pipeline.batches import any_loss, split
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

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations the first rank holds at once, under ``gpipe`` and ``1f1b``."""
        return self.microbatches if self.schedule == "gpipe" else min(self.stages, self.microbatches)


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
        self._targets, self._losses = split(target, number), []
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
            return any_loss(output)
        loss = self._loss(output, self._targets[int(place)])
        self._losses.append(loss.detach())
        return self._scaled(loss)


def _as_it_is(loss: Tensor) -> Tensor:
    return loss
