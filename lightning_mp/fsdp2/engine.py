"""The step where each rank holds a shard of every parameter: FSDP2, tensor parallel, FSDP1.

A shard is unscaled, checked and stepped as a whole parameter is; the norm and the replay have to know of the others.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.torch import is_compiled
from lightning_mp.errors import Fault
from lightning_mp.fsdp2.shard_watch import FirstForward, ShardReads, WholeNorms, sum_total_norms
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics import grads
from lightning_mp.plan.engine import NOTHING, StepEngine


class ShardedEngine(StepEngine):
    """Carries a policy out on sharded parameters."""

    holds = "every process holds a shard of every parameter"
    evaluates_once = "on sharded parameters"
    steps = (("DTensors", "sharded parameters"),)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: the groups that plain gradients are split over
        self._flat_groups: grads.Groups = ()
        self._unused: sharding_compat.UnusedParameters | None = None
        self._reads: ShardReads | None = None

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, and watch the units of FSDP1 or FSDP2."""
        self._flat_groups = flat_groups(model)
        self.steps = (("flat pieces", "sharded parameters"),) if self._flat_groups else ShardedEngine.steps
        super().connect(model, optimizers)
        self._unused = self._reads = None
        if optimizers:
            self._connected.callback(sharding_compat.sync_hooks_and_requires_grad(model))
            if self._flat_groups:
                self._connected.enter_context(sum_total_norms(self, lambda: self._flat_groups))
        if self.distributed:
            self.hook_watch = WholeNorms()
            units: dict[str, Any] = {
                plain_name(name): unit
                for name, unit in model.named_modules()
                if unit is not model and isinstance(unit, (FSDPModule, FullyShardedDataParallel))
            }
            compiled = any(map(is_compiled, model.modules()))
            self._reads = None if compiled else ShardReads(model, sharding_compat.shards(model))
            self._connected.callback(FirstForward(model, units, self.device, compiled=compiled).release)
            if optimizers:
                self._unused = sharding_compat.UnusedParameters(model, self.device)
                self._connected.callback(self._unused.release)

    def on_trained_changed(self) -> None:
        """Raise a RuntimeError within an accumulation window under FSDP1, whose flat gradients would lose it."""
        if self._flat_groups and self.pending:
            given = "parameters frozen or unfrozen within an accumulation window, with FSDP1"
            raise RuntimeError(str(Fault(given, fix="change them after a step, or use strategy='mp_fsdp2'")))

    def unscale(self, optimizer: Optimizer) -> None:
        """One pass over the local shards; the flag is reduced over every rank of every mesh dimension."""
        grads.sum_partial_(grads.parameters_of(optimizer))
        super().unscale(optimizer)

    def first_step(self, method: str) -> AbstractContextManager[Any]:
        """As in the base class; what takes the shape of a sharded weight is seen to in every step."""
        around = super().first_step(method)
        return self._reads if around is NOTHING and self._reads and self._reads.needed else around

    @contextmanager
    def _first_step(self, module: nn.Module) -> Generator[None, None, None]:
        with super()._first_step(module), self._reads or NOTHING:
            yield

    def after_backward(self) -> None:
        """Reduce partial gradients, and unscale them, before users look at them."""
        if self._unused is not None:
            self._unused.finish_backward()
        if self.manual:
            for optimizer in self.optimizers:
                grads.sum_partial_(grads.parameters_of(optimizer))
        super().after_backward()

    def release(self) -> None:
        """Let go of FSDP2's units too, as a new run finds them also after a failure, and of what was shadowed."""
        if self._module is not None:
            sharding_compat.reset_units(self._module)
        super().release()
        self._reads = self._unused = None

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the norm over all shards, in fp32."""
        parameters = grads.parameters_of(optimizer)
        self.last_norm = grads.global_norm(parameters, self.device, self._flat_groups)
        grads.clip_to_(parameters, max_norm, self.last_norm)


def flat_groups(model: nn.Module | None) -> grads.Groups:
    """The process group over which FSDP1 splits flat parameters, if it does."""
    if not isinstance(model, FullyShardedDataParallel):
        return ()
    group = model.process_group
    sharded = model.sharding_strategy is not ShardingStrategy.NO_SHARD
    return (group,) if group is not None and sharded and group.size() > 1 else ()
