"""The measurement of one step: norms of whole or sharded parameters, the step's update, memory.

Numbers stay on the device until :class:`ToHost` has copied them, without a device sync.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat import deepspeed as compat
from lightning_mp.compat.lightning import DeepSpeedStrategy, LightningModule, Trainer
from lightning_mp.compat.torch import left_scaled_by_stock
from lightning_mp.fsdp2.engine import flat_groups
from lightning_mp.health.scale_sources import DeepSpeedSource, Number, ScaleSource, StockSource
from lightning_mp.health.throughput import FLOPS, SECONDS, Processed
from lightning_mp.modules.remote import is_remote
from lightning_mp.numerics.grads import Groups, gradients, local, shard_groups, squares
from lightning_mp.record import metric_names

Values = dict[str, float | None]
Measured = dict[str, Number | None]
GIB = 2**30
#: the greatest number of steps after which the numbers of a step are evaluated
LAG = 3
#: number and size of the evenly spaced pieces of a larger local shard that the update ratio uses
PIECES, PIECE = 16, 1024
_CHANGE, _BEFORE = "change", "before"
# Names of the values whose sum over ranks is taken, and of those whose maximum is taken.
_ADDED = (metric_names.LOSS, metric_names.SAMPLES_PER_S, metric_names.TOKENS_PER_S, FLOPS)
_LARGEST = (SECONDS, metric_names.MEMORY_ALLOCATED, metric_names.MEMORY_PEAK)


class StepMeasurement:
    """The numbers of one step, collected on the device of the run.

    The order of calls in a step is ``begin``, ``add_loss`` for each backward pass, ``before_step``
    for each optimizer, ``after_step`` and ``take``. ``take`` may also be called before the step.
    ``derived`` then reads a copy on the host.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        self._device, self._world = strategy.root_device, trainer.world_size
        over = getattr(strategy, "parameter_groups", ())
        #: the storage of the run's parameters
        self.layout = Layout(flat_groups(trainer.model), isinstance(strategy, DeepSpeedStrategy), over)
        self._all = list(module.parameters())
        self._order = list(dict.fromkeys(self.layout.parameter(each).groups for each in self._all))
        self._accumulates = trainer.accumulate_grad_batches if module.automatic_optimization else 0
        sampler: Any = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        # Ranks that share one batch (tensor parallelism) count it once.
        self._share = sampler.get("num_replicas", self._world) / self._world
        self.begin()

    def begin(self) -> None:
        """Begin to measure a step, and drop the numbers of the step before."""
        self._losses: list[Tensor] = []
        self._seen: set[int] = set()
        self._before: dict[Kind, Shard] = {}
        self._trained = [parameter for parameter in self._all if parameter.requires_grad]
        self._sums = SquareSums(self._device, self._order)
        #: the learning rate of the first group of the first optimizer that stepped
        self.lr: Number | None = None

    def add_loss(self, loss: Tensor, source: ScaleSource | None) -> None:
        """Add the ``loss`` of a backward pass. The precision plugin has scaled it already."""
        loss = loss.detach().float().sum()
        scale = None if source is None or isinstance(source, DeepSpeedSource) else source.scale()
        self._losses.append(loss if scale is None else loss / scale)

    def loss_is_bad(self) -> bool:
        """True if a loss of the present step is not finite on this rank. A device sync."""
        return bool(self._losses) and not bool(torch.isfinite(torch.stack(self._losses)).all())

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, source: ScaleSource | None) -> None:
        """Measure the gradients of the parameters of ``optimizer``, without the loss scale.

        The first call of a step also measures the weights. If an optimizer steps several times in a
        batch, its first step counts. ZeRO's gradients are measured for all parameters at once.
        """
        parameters = self._trained
        if not self._seen:
            # Lightning's stand-in for no optimizer has no groups. Adafactor's rate may be None.
            self.lr = next((group["lr"] for group in optimizer.param_groups), None)
            self._before = copied(self._parameters())
            self._sums.add(list(self._before.values()), _BEFORE)
        if not self.layout.zero:
            own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} - self._seen
            parameters = [parameter for parameter in parameters if id(parameter) in own]
        elif self._seen:
            return
        self._seen.update(map(id, parameters))
        shards = [self.layout.gradient(parameter) for parameter in parameters]
        scaled = self.layout.zero or (isinstance(source, StockSource) and left_scaled_by_stock(optimizer))
        scale = source.scale() if source and scaled else None
        self._sums.add(shards, metric_names.GRAD_NORM, divisor=scale)

    @torch.no_grad()
    def after_step(self) -> None:
        """Measure the parameters after the step, and their change by the step."""
        shards = self._parameters()
        now = copied(shards)
        for kind, shard in now.items():
            shard.tensor.sub_(self._before.pop(kind).tensor)
        self._sums.add(list(now.values()), _CHANGE)
        self._sums.add(shards, metric_names.PARAM_NORM)

    def take(self, done: Processed | None = None) -> Measured:
        """Return the measurements since the last call, as input of :meth:`derived`.

        A collective: the result is the same on every rank. ``done`` is the work of this rank since
        the last reading. Without it memory is not measured.
        """
        norms, self._sums = self._sums.norms(), SquareSums(self._device, self._order)
        loss = torch.stack(self._losses).sum() if self._losses else None
        if loss is not None and self._accumulates:
            loss = loss * (self._accumulates / len(self._losses))
        values: Measured = {**dict.fromkeys((*_ADDED, *_LARGEST)), **(done or {}), metric_names.LOSS: loss}
        if done is not None:
            values |= zip(_LARGEST[1:], memory(self._device), strict=True)
        for names, op in ((_ADDED, dist.ReduceOp.SUM), (_LARGEST, dist.ReduceOp.MAX)) if self._world > 1 else ():
            values |= zip(names, self._reduced([values[name] for name in names], op), strict=True)
        return norms | values | ({metric_names.LOSS: None} if loss is None else {})

    def _reduced(self, mine: Sequence[Number | None], op: Any) -> list[Number | None]:
        """Return the values reduced over all ranks by ``op``: NaN if a rank does not know its own.

        A collective.
        """
        known = [math.nan if value is None or isinstance(value, Tensor) else float(value) for value in mine]
        row = torch.tensor(known, dtype=torch.float32)
        if self._device.type == "cuda":
            row = row.pin_memory()  # a copy from pageable memory waits for the device
        row = row.to(self._device, non_blocking=True)
        for place, value in enumerate(mine):
            if isinstance(value, Tensor):
                row[place] = value
        dist.all_reduce(row, op=op)
        return list(row)

    def derived(self, read: Values) -> Values:
        """Return the values of a step from the host's copy of the result of :meth:`take`.

        Sums become means and rates. An unknown value is ``None``.
        """
        values, loss = dict(read), read.get(metric_names.LOSS)
        for name in (*_ADDED[1:], *_LARGEST):  # NaN: a rank did not know its own value
            values[name] = None if math.isnan(read[name] or 0.0) else read[name]
        if loss is not None:
            values[metric_names.LOSS] = loss / self._world
        seconds = values[SECONDS] = values[SECONDS] or None
        for name in _ADDED[1:]:
            amount, share = values[name], 1 / self._world if name == FLOPS else self._share
            values[name] = None if amount is None or seconds is None else amount * share / seconds
        change, before = values.pop(_CHANGE, None), values.pop(_BEFORE, None)
        if change is not None and before:
            values[metric_names.UPDATE_RATIO] = change / before
        return values

    def _parameters(self) -> list[Shard]:
        return [self.layout.parameter(parameter) for parameter in self._trained]


def memory(device: torch.device) -> tuple[float | None, float | None]:
    """Return the GiB in use and their peak, without a device sync. ``None`` if not counted.

    On a CPU, under Linux, both are the resident memory of the process, which includes code.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GIB, torch.cuda.max_memory_allocated(device) / GIB
    if device.type == "mps":
        return torch.mps.current_allocated_memory() / GIB, None
    if device.type != "cpu" or sys.platform != "linux":
        return None, None
    import resource

    resident = int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()
    return resident / GIB, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


# ---------------------------------------------------------------------- shards


class Shard(NamedTuple):
    """This rank's shard of a tensor, which may be empty, and the groups over which it is split."""

    tensor: Tensor
    groups: Groups


@dataclass(frozen=True, slots=True)
class Layout:
    """The storage of parameters and gradients: whole, DTensors, FSDP1's views, or ZeRO's shards.

    Its methods must be called under ``torch.no_grad()``.

    Args:
        whole: the groups over which *plain* tensors are sharded, as under FSDP1.
        zero: True under ZeRO, which shards over all ranks.
        over: the groups of every tensor, if these are equal for all, as for stages of a pipeline.
    """

    whole: Groups = ()
    zero: bool = False
    over: Groups = ()

    def _groups(self, tensor: Tensor) -> Groups:
        return self.over or shard_groups(tensor, self.whole)

    def parameter(self, parameter: Tensor) -> Shard:
        """Return this rank's shard of ``parameter``. It is empty if another process holds it."""
        if self.zero and compat.is_partitioned(parameter):
            return Shard(compat.local_part(parameter), _everyone())
        if is_remote(parameter):
            return Shard(parameter.new_empty(0), self._groups(parameter))
        shard = local(parameter)
        return Shard(torch.view_as_real(shard) if shard.is_complex() else shard, self._groups(parameter))

    def gradient(self, parameter: Tensor) -> Shard:
        """Return this rank's shard of the gradient. It is empty without a gradient.

        The groups are the same on every rank. A partial gradient is summed over ranks, by a
        collective.
        """
        gradient: Any = parameter.grad
        if gradient is None:
            shard = compat.local_gradient(parameter) if self.zero else None
            return (
                Shard(parameter.new_empty(0), self._groups(parameter)) if shard is None else Shard(shard, _everyone())
            )
        if hasattr(gradient, "to_local") and any(kind.is_partial() for kind in gradient.placements):
            # Tensor parallelism leaves partial gradients, which are not yet summed over ranks.
            gradient = gradient.redistribute(gradient.device_mesh, cast("Any", parameter).placements)
            return Shard(local(gradient), self._groups(gradient))
        return Shard(gradients([parameter])[0], self._groups(gradient))


def _everyone() -> Groups:
    group = dist.group.WORLD if dist.is_initialized() else None
    return () if group is None or group.size() == 1 else (group,)


class SquareSums:
    """Sums of squares by name, with an all-reduce in each process group.

    ``order`` is the order of the sets of groups, which must be the same on every rank.
    """

    def __init__(self, device: torch.device, order: Iterable[Groups]) -> None:
        self._device = device
        self._sums: dict[Groups, dict[str, Tensor]] = {groups: {} for groups in order}

    def add(self, shards: Sequence[Shard], name: str, divisor: Number | None = None) -> None:
        """Add the squares of ``shards``, which are first divided by ``divisor``, under ``name``.

        Every rank must add shards with the same process groups.
        """
        values = squares([shard.tensor for shard in shards], self._device)
        if divisor is not None:
            values = (values.sqrt() / divisor).square()  # the square of a scale may be beyond fp32
        for groups in dict.fromkeys(shard.groups for shard in shards):
            places = [place for place, shard in enumerate(shards) if shard.groups == groups]
            every = len(places) == len(shards)
            value = (values if every else torch.stack([values[place] for place in places])).sum()
            sums = self._sums.setdefault(groups, {})
            sums[name] = sums.get(name, 0.0) + value

    def norms(self) -> dict[str, Tensor]:
        """Return the 2-norm of each name over all ranks, fp32 scalars on the device.

        A collective.
        """
        total: dict[str, Tensor] = {}
        for groups, sums in ((groups, sums) for groups, sums in self._sums.items() if sums):
            values = torch.stack(list(sums.values()))
            for group in groups:
                dist.all_reduce(values, group=group)
            for name, value in zip(sums, values, strict=True):
                total[name] = total.get(name, 0.0) + value
        return {name: value.sqrt() for name, value in total.items()}


Kind = tuple[Groups, torch.dtype, torch.device, int]


def copied(shards: Iterable[Shard]) -> dict[Kind, Shard]:
    """Return copies of the shards, concatenated by kind: groups, dtype, device, sampled or not.

    A large shard is represented by a sample, ``PIECES`` pieces of ``PIECE`` elements.
    """
    by_kind: dict[Kind, list[Tensor]] = {}
    for tensor, groups in shards:
        piece = tensor.reshape(-1)
        if piece.numel() > PIECES * PIECE:
            piece = piece.as_strided((PIECES, PIECE), (piece.numel() // PIECES, 1))
        by_kind.setdefault((groups, tensor.dtype, tensor.device, piece.dim()), []).append(piece)
    return {kind: Shard(torch.cat(pieces), kind[0]) for kind, pieces in by_kind.items()}


# ---------------------------------------------------------------------- the way to the host


@dataclass(slots=True)
class Sent:
    """Values on their way to the host: the values of ``names`` are being copied into ``host``."""

    values: Values
    names: Sequence[str]
    host: Tensor | None
    event: Any
    then: Callable[[Values], object]
    age: int = 0


class ToHost:
    """A queue that copies values from ``device`` to pinned memory, and delivers them in order.

    On CUDA they are delivered at most ``lag`` steps later. With several ``ranks`` it is always
    ``lag`` steps, because all ranks must act in the same step. On other devices the next
    ``deliver`` delivers them.
    """

    def __init__(self, device: torch.device, ranks: int = 1, lag: int = LAG) -> None:
        self._device, self._ranks, self._lag = device, ranks, lag
        self._under_way: deque[Sent] = deque()

    def send(self, values: Mapping[str, Number | None], then: Callable[[Values], object]) -> None:
        """Start to copy ``values``. :meth:`deliver` will call ``then`` with them."""
        self._under_way.append(self._start(values, then))

    def deliver(self, *, wait: bool = False) -> None:
        """Deliver the values that have arrived. Call it after every step.

        With ``wait`` it delivers all values, a device sync. Errors of ``then`` are raised.
        """
        for sent in self._under_way:
            sent.age += 1
        while self._under_way:
            sent = self._under_way[0]
            if not (wait or sent.event is None or sent.age > self._lag or (self._ranks == 1 and sent.event.query())):
                break
            self._under_way.popleft()
            sent.then(self._arrived(sent))

    def read(self, values: Mapping[str, Number | None]) -> Values:
        """Return ``values`` on the host at once. A device sync."""
        return self._arrived(self._start(values, lambda _: None))

    def _arrived(self, sent: Sent) -> Values:
        if sent.event is not None:
            sent.event.synchronize()
        return sent.values | ({} if sent.host is None else dict(zip(sent.names, sent.host.tolist(), strict=True)))

    def _start(self, values: Mapping[str, Number | None], then: Callable[[Values], object]) -> Sent:
        kind, host, event = self._device.type, None, None
        there = {n: v.detach() for n, v in values.items() if isinstance(v, Tensor) and v.device.type == kind}
        known: Values = {n: None if v is None or n in there else float(v) for n, v in values.items()}
        if there:  # a non-blocking copy of torch's goes into pinned memory
            numbers = torch.stack([value.reshape(()).float() for value in there.values()])
            host = numbers.to("cpu", non_blocking=kind == "cuda")
            if kind == "cuda":
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
        return Sent(known, list(there), host, event, then)
