"""The measurement of one step: collected on the device in the course of the step, and read together at its end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule, Trainer
from lightning_mp.compat.torch import takes_flag
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.engines.sharded import flat_groups
from lightning_mp.errors import Faults
from lightning_mp.monitor import metric_names
from lightning_mp.monitor.alerts import Operand
from lightning_mp.monitor.health.lost_updates import LOST, MOVED, LostUpdates
from lightning_mp.monitor.health.memory import memory
from lightning_mp.monitor.health.norms import Snapshot, SquareSums, in_groups, named_parameters
from lightning_mp.monitor.health.scale_sources import DeepSpeedSource, Number, ScaleSource, StockSource, read_together
from lightning_mp.monitor.health.shards import Layout, Shard
from lightning_mp.monitor.health.throughput import Processed

Values = dict[str, float | None]
_CHANGE, _BEFORE, _SIZE = "change", "before", "size"
#: what every rank reports about itself, in this order
_COLUMNS = ("loss", "samples", "tokens", "flops", "seconds", "allocated", "reserved", "peak")


class StepMeasurement:
    """Collects a step's numbers on the device of the run; ``read`` copies all of them to the host together."""

    def __init__(self, trainer: Trainer, module: LightningModule, groups: Mapping[str, str], faults: Faults) -> None:
        strategy = trainer.strategy
        self._device, self._world, self._rank = strategy.root_device, trainer.world_size, trainer.global_rank
        over = getattr(strategy, "parameter_groups", ())
        self._layout = Layout(flat_groups(trainer.model), isinstance(strategy, DeepSpeedStrategy), over)
        self._named, self._groups = named_parameters(module), in_groups(module, groups, faults)
        self._order = list(dict.fromkeys(self._layout.parameter(value).groups for value in self._named.values()))
        self._accumulates = trainer.accumulate_grad_batches if module.automatic_optimization else 0
        sampler: Any = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        #: ranks that share one batch (tensor parallel) count it once
        self._share = sampler.get("num_replicas", self._world) / self._world
        plugin = trainer.precision_plugin
        engine = plugin.engine if isinstance(plugin, PlanBase) else None
        self._fp8 = None if engine is None else engine.fp8
        #: of the last reading: what became of FP8's operands
        self.operands: dict[tuple[str, str], Operand] = {}
        self.begin()

    def begin(self) -> None:
        """A step that is to be measured begins."""
        self._losses: list[Tensor] = []
        self._seen: set[int] = set()
        self._snapshot: Snapshot | None = None
        self._norm_before: float | None = None
        self._lost = LostUpdates(self._layout)
        self._trained = {name: value for name, value in self._named.items() if value.requires_grad}
        self._sums = self._no_sums()
        self.operands = {}
        if self._fp8 is not None:
            self._fp8.watch.begin(self._fp8.converted, self._device)
        #: of the first group of the first optimizer that stepped
        self.lr: Number | None = None

    def add_loss(self, loss: Tensor, source: ScaleSource | None) -> None:
        """A backward pass starts from ``loss``, which the precision plugin has scaled by now."""
        loss = loss.detach().float().sum()
        scale = None if source is None or isinstance(source, DeepSpeedSource) else source.scale()
        self._losses.append(loss if scale is None else loss / scale.scale)

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, source: ScaleSource | None, lr_factor: float) -> None:
        """Measure the unscaled gradients that ``optimizer`` is about to use, and the weights before the first step.

        Of an optimizer that steps several times in a batch the first step counts.
        """
        parameters = self._trained
        if not self._seen:
            lr = optimizer.param_groups[0]["lr"]
            self.lr = None if lr is None else lr * lr_factor  # Adafactor may have its own
            self._snapshot = Snapshot(self._parameters())
            self._snapshot.add_before(self._sums, _BEFORE)
        if not self._layout.zero:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} - self._seen
            parameters = {name: parameter for name, parameter in parameters.items() if id(parameter) in own}
        elif self._seen:
            return
        self._seen.update(map(id, parameters.values()))
        self._lost.before_step(optimizer, parameters)
        shards = [self._layout.gradient(parameter) for parameter in parameters.values()]
        self._sums.add_size(shards, _SIZE)
        wanted = {
            f"{metric_names.GRAD_NORM}/{group}": {place for place, name in enumerate(parameters) if name in members}
            for group, members in self._groups.items()
        }
        self._sums.add(
            shards, {metric_names.GRAD_NORM: None, **wanted}, divisor=_divisor(optimizer, source, self._layout)
        )

    @torch.no_grad()
    def after_step(self) -> None:
        """Measure the parameters as they are now, and how far the step has moved them."""
        assert self._snapshot is not None, "before_step() comes first"
        shards = self._parameters()
        self._snapshot.add_change(shards, self._sums, _CHANGE)
        self._sums.add(shards, {metric_names.PARAM_NORM: None})
        self._lost.after_step(self._sums)
        self._snapshot = None

    def read(self, others: Mapping[str, Number | None], done: Processed | None = None) -> Values:
        """Everything measured since the last read, and ``others``, in one device sync, the same on every rank.

        ``done`` is what this rank has processed; without it, memory and FP8's operands are not read either.
        """
        tables = [] if done is None or self._fp8 is None else [self._fp8.watch.end()]
        norms, self._sums = self._sums.norms(), self._no_sums()
        mine = dict(zip(_COLUMNS, self._mine(done), strict=True))
        if self._world == 1:
            read, found = read_together({**norms, **others, **mine}, self._device, *tables)
            rows = [[_number(read.pop(name)) for name in _COLUMNS]]
        else:
            tables = [self._table(list(mine.values())), *tables]
            read, (rows, *found) = read_together({**norms, **others}, self._device, *tables)
        if found and self._fp8 is not None:
            named = self._fp8.watch.operands(found[0])
            self.operands = {place: Operand(*numbers) for place, numbers in named.items()}
            read[metric_names.FP8_FLUSHED] = max((one.flushed for one in self.operands.values()), default=None)
        self._norm_before = read.pop(_BEFORE, self._norm_before)
        change = read.pop(_CHANGE, None)
        if change is not None and self._norm_before:
            read[metric_names.UPDATE_RATIO] = change / self._norm_before
        lost, moved = read.pop(LOST, None), read.pop(MOVED, None)
        if lost is not None and moved:
            read[metric_names.LOST_UPDATES] = lost / moved
        if read.pop(_SIZE, None) == 0.0:  # the step was dropped already
            read = {name: None if name.startswith(metric_names.GRAD_NORM) else value for name, value in read.items()}
        return {**read, **self._over_ranks(rows)}

    def loss_is_bad(self) -> bool:
        """Whether a loss of the step at hand is not finite on this rank; a device sync."""
        return bool(self._losses) and not bool(torch.isfinite(torch.stack(self._losses)).all())

    def _parameters(self) -> list[Shard]:
        return [self._layout.parameter(parameter) for parameter in self._trained.values()]

    def _no_sums(self) -> SquareSums:
        return SquareSums(self._device, self._order)

    def _mine(self, done: Processed | None) -> list[Number | None]:
        """What this rank reports about itself, in the order of the columns."""
        loss = torch.stack(self._losses).sum() if self._losses else None
        if loss is not None and self._accumulates:
            loss = loss * (self._accumulates / len(self._losses))
        if done is None:
            return [loss, *[None] * (len(_COLUMNS) - 1)]
        return [loss, done.samples, done.tokens, done.flops, done.seconds, *memory(self._device)]

    def _table(self, mine: Sequence[Number | None]) -> Tensor:
        """One row per rank, shape (world, len(_COLUMNS)), the same on every rank."""
        known = [math.nan if value is None or isinstance(value, Tensor) else float(value) for value in mine]
        row = torch.tensor(known, dtype=torch.float32)
        if self._device.type == "cuda":
            row = row.pin_memory()  # else the copy waits for the device
        row = row.to(self._device, non_blocking=True)
        for place, value in enumerate(mine):
            if isinstance(value, Tensor):
                row[place] = value
        table = row.new_zeros(self._world, len(row))
        table[self._rank] = row
        dist.all_reduce(table)  # a sum with zeros: an all-gather that every backend has
        return table

    def _over_ranks(self, rows: Sequence[Sequence[float]]) -> Values:
        columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
        seconds = _largest(columns["seconds"])
        largest = {name: _largest(columns[name]) for name in ("allocated", "reserved", "peak")}
        return {
            metric_names.LOSS: sum(columns["loss"]) / len(rows) if self._losses else None,
            metric_names.TOKENS_PER_S: _rate(columns["tokens"], seconds, self._share),
            metric_names.SAMPLES_PER_S: _rate(columns["samples"], seconds, self._share),
            "seconds": seconds or None,
            "flops_per_s": _rate(columns["flops"], seconds, 1 / len(rows)),
            metric_names.MEMORY_ALLOCATED: largest["allocated"],
            metric_names.MEMORY_RESERVED: largest["reserved"],
            metric_names.MEMORY_PEAK: largest["peak"],
        }


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _rate(amounts: Sequence[float], seconds: float | None, share: float) -> float | None:
    total = sum(amounts)
    return None if math.isnan(total) or not seconds else total * share / seconds


def _largest(values: Sequence[float]) -> float | None:
    return None if any(map(math.isnan, values)) else max(values)


def unscales_in_step(optimizer: Optimizer, source: ScaleSource | None) -> bool:
    """Whether torch's scaler leaves unscaling to the (fused) optimizer, as under stock Lightning."""
    return isinstance(source, StockSource) and takes_flag(optimizer)


def _divisor(optimizer: Optimizer, source: ScaleSource | None, layout: Layout) -> Number | None:
    """What gradients are still multiplied by."""
    if source is None or not (layout.zero or unscales_in_step(optimizer, source)):
        return None
    scale = source.scale()
    return None if scale is None else scale.scale
