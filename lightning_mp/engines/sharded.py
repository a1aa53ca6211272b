"""The step where each rank holds a part: a shard of every parameter (FSDP2, tensor parallel, FSDP1), or a stage.

A part is unscaled, checked and stepped as whole parameters are; the norm and the replay have to know of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.lightning import trainer_of
from lightning_mp.compat.torch import FSDP1_WRAPPER, is_compiled
from lightning_mp.engines import optimizer_facts
from lightning_mp.engines.base import Replay, StepEngine
from lightning_mp.engines.diagnosis import Verdict
from lightning_mp.engines.shard_watch import FirstForward, ShardReads, WholeNorms, sum_total_norms
from lightning_mp.errors import Fault, Faults, NonFiniteError, PlanError
from lightning_mp.numerics import grads


class ShardedEngine(StepEngine):
    """Carries a policy out on sharded parameters."""

    holds = "every process holds a shard of every parameter"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: what ends what was put in the place of torch's functions
        self._undo: list[Callable[[], None]] = []
        #: the groups that plain gradients are split over
        self._flat_groups: grads.Groups = ()
        self._unused: sharding_compat.UnusedParameters | None = None
        self._first: FirstForward | None = None
        self._reads: ShardReads | None = None
        self._seen: set[str] = set()

    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Refuse optimizers that cannot update shards, and those that evaluate the closure again (LBFGS, SAM)."""
        for optimizer in optimizers:
            if optimizer_facts.is_known_to_evaluate_again(optimizer):
                faults.extend([optimizer_facts.evaluates_again(optimizer, "on sharded parameters")])
            else:
                shards = "flat pieces" if self._flat_groups else "DTensors"
                optimizer_facts.check_shards(optimizer, shards, "sharded parameters", faults)

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, and watch the units of FSDP1 or FSDP2."""
        self._flat_groups = flat_groups(model)
        super().connect(model, optimizers)
        self._release_units()
        if optimizers:
            self._undo = [sharding_compat.keep_alike(model)]
            if self._flat_groups:
                self._undo.append(sum_total_norms(self, lambda: self._flat_groups))
        if self.distributed:
            self.hook_watch = WholeNorms()
            units: dict[str, Any] = {
                f".{name}".replace(FSDP1_WRAPPER, "")[1:]: unit
                for name, unit in model.named_modules()
                if unit is not model and isinstance(unit, (FSDPModule, FullyShardedDataParallel))
            }
            compiled = any(map(is_compiled, model.modules()))
            self._reads, self._seen = None if compiled else self._reads_of(model), set()
            self._first = FirstForward(model, units, self.device, compiled=compiled)
            self._unused = sharding_compat.UnusedParameters(model, self.device) if optimizers else None

    def unscale(self, optimizer: Optimizer) -> None:
        """One pass over the local shards; the flag is reduced over every rank of every mesh dimension."""
        grads.sum_partial_(grads.parameters_of(optimizer))
        super().unscale(optimizer)

    @contextmanager
    def training_step(self) -> Generator[None, None, None]:
        """As in the base class, and watched."""
        with super().training_step(), self.watch_reads("training_step"):
            yield

    def watch_reads(self, method: str) -> AbstractContextManager[Any]:
        """Around a step: uses of sharded weights are watched in the first of ``method``, in all where it is needed."""
        first = method not in self._seen
        self._seen.add(method)
        return self._reads if self._reads is not None and (first or self._reads.needed) else nullcontext()

    def _reads_of(self, model: nn.Module) -> ShardReads:
        named = ((name.replace(f"{FSDP1_WRAPPER[1:]}.", ""), one) for name, one in model.named_parameters())
        units = (unit for unit in model.modules() if isinstance(unit, FullyShardedDataParallel))
        flat = {id(one) for unit in units for one, _ in sharding_compat.flat_members(unit)}
        return ShardReads(
            named, lambda one: isinstance(one, DTensor) or id(one) in flat, silent=bool(self._flat_groups)
        )

    def explain(self, error: RuntimeError) -> None:
        """Say why a backward pass failed.

        Raises:
            PlanError: a sharded weight was used in the step, or the pass went through one before it.
        """
        if self._reads is not None:
            self._reads.explain(error)
        if "setStorage" in str(error):
            raise PlanError.of(
                "a backward pass through another one (create_graph=True, as for a gradient penalty) met weights that "
                "the first one had let go: they are gathered for one pass",
                "use strategy='mp_ddp', or leave out wrap=, which keeps a small model in one unit",
                "strategy",
            ) from error

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
        self._release_units()
        self._reads = None

    def _release_units(self) -> None:
        while self._undo:
            self._undo.pop()()
        for watching in (self._unused, self._first):
            if watching is not None:
                watching.release()
        self._unused = self._first = None

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the norm over all shards, in fp32."""
        parameters = grads.parameters_of(optimizer)
        self.last_norm = grads.global_norm(parameters, self.device, self._flat_groups)
        grads.clip_to_(parameters, max_norm, self.last_norm)

    def _error(self, replay: Replay, verdict: Verdict) -> NonFiniteError:
        assert self._module is not None
        alone = None if replay is None else partial(_alone, self._module, replay)
        error = super()._error(alone, verdict)
        error.args = (str(error).replace(FSDP1_WRAPPER, ""), *error.args[1:])
        error.module, error.parameter = (
            name and name.replace(FSDP1_WRAPPER, "") for name in (error.module, error.parameter)
        )
        return error


def _alone(module: nn.Module, replay: Callable[[], Tensor | None]) -> Tensor | None:
    """Replay without summing gradients over ranks, so that each rank sees its own."""
    with sharding_compat.unsummed_gradients(module):
        return replay()


def flat_groups(model: nn.Module | None) -> grads.Groups:
    """The process group over which FSDP1 splits flat parameters, if it does."""
    if not isinstance(model, FullyShardedDataParallel):
        return ()
    group = model.process_group
    sharded = model.sharding_strategy is not ShardingStrategy.NO_SHARD
    return (group,) if group is not None and sharded and group.size() > 1 else ()


class PipelineEngine(StepEngine):
    """Carries a policy out where gradients are those of one stage; the flag is the maximum over all of them."""

    holds = "every process holds a stage of the layers"
    _undo_norm: Callable[[], None] | None = None

    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Refuse those that evaluate a closure, which would run the schedule again, and those that need all weights."""
        for optimizer in optimizers:
            if optimizer_facts.calls_closure_again(optimizer):
                faults.extend([_again(optimizer)])
            optimizer_facts.check_shards(optimizer, "a stage", "a stage's parameters alone", faults)
            optimizer_facts.check_shards(optimizer, "DTensors", "sharded parameters", faults)

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers; from then on ``clip_grad_norm_`` on a stage's gradients is by the norm of all."""
        super().connect(model, optimizers)
        if optimizers and self._undo_norm is None:
            self._undo_norm = sum_total_norms(self, lambda: self._stages)

    def release(self) -> None:
        """Let go of ``clip_grad_norm_`` too."""
        super().release()
        if self._undo_norm is not None:
            self._undo_norm()
            self._undo_norm = None

    def evaluates_again(self, optimizer: Optimizer) -> None:
        """Refused: another evaluation would run the schedule again."""
        raise PlanError([_again(optimizer)])

    @property
    def _stages(self) -> grads.Groups:
        trainer = trainer_of(self._module)
        strategy: Any = None if trainer is None else trainer.strategy
        return () if strategy is None else (strategy.stage_group,)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the norm over all stages, in fp32."""
        parameters = grads.parameters_of(optimizer)
        own = grads.global_norm(parameters, self.device)
        self.last_norm = grads.over_shards(own, 2.0, self._stages)
        grads.clip_to_(parameters, max_norm, self.last_norm)


def _again(optimizer: Optimizer) -> Fault:
    return optimizer_facts.evaluates_again(optimizer, "under pipeline parallelism")
