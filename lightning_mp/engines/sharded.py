"""The step where each rank holds a part: a shard of every parameter (FSDP2, tensor parallel, FSDP1), or a stage.

A part is unscaled, checked and stepped as whole parameters are; the norm and the replay have to know of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.lightning import trainer_of
from lightning_mp.compat.torch import FSDP1_WRAPPER, is_compiled
from lightning_mp.engines import optimizer_facts
from lightning_mp.engines.base import Replay, StepEngine, max_over_ranks_
from lightning_mp.engines.diagnosis import Verdict
from lightning_mp.engines.shard_watch import FirstForward, ShardReads, WholeNorms, ranks_apart, sum_total_norms
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
        self._unused: UnusedParameters | None = None
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
            self._undo = [sharding_compat.keep_alike(group) for group in sharding_compat.groups_below(model)]
            if self._flat_groups:
                self._undo.append(sum_total_norms(self, lambda: self._flat_groups))
        if self.distributed:
            pieces = "under FSDP1, whose ranks hold flat pieces of the gradients" if self._flat_groups else None
            self.hook_watch = WholeNorms(pieces=pieces)
            units: dict[str, Any] = {
                f".{name}".replace(FSDP1_WRAPPER, "")[1:]: unit
                for name, unit in model.named_modules()
                if unit is not model and isinstance(unit, (FSDPModule, FullyShardedDataParallel))
            }
            compiled = any(map(is_compiled, model.modules()))
            self._reads, self._seen = None if compiled else self._reads_of(model), set()
            self._first = FirstForward(model, units, self.device, compiled=compiled)
            self._unused = UnusedParameters(model, self.device) if optimizers else None

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
            fault = Fault(
                "a backward pass through another one (create_graph=True, as for a gradient penalty) met weights that "
                "the first one had let go: they are gathered for one pass",
                "",
                "use strategy='mp_ddp', or leave out wrap=, which keeps a small model in one unit",
            )
            raise PlanError([fault], "strategy") from error

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


class UnusedParameters:
    """Leaves parameters that a step did not use on some rank (experts) the gradients that DDP would, under FSDP2.

    FSDP2 reduces, of each unit, the parameters that have a gradient on this rank: ranks that used different ones add
    up different ones. Here a unit reduces all it has, with zeros for what the rank did not use; and what no rank used
    has no gradient afterwards, as under DDP's ``find_unused_parameters``, so that no optimizer moves it.
    A backward pass costs one all-reduce of a flag a parameter. Reading it is a device sync, made only where a gradient
    was missing on this rank, as DDP does.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        groups = sharding_compat.groups_below(model)
        self._uses = [sharding_compat.Uses(group, partial(self._complete, group)) for group in groups]
        self._members = [member for group in groups for member in sharding_compat.members_of(group)]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [names.get(id(sharding_compat.shard_of(member)), "") for member in self._members]
        #: by ``id``, what had a gradient on this rank, what had none since the step before either, and what is in a
        #: unit that did not run
        self._used, self._missed, self._skipped = set[int](), set[int](), set[int]()
        #: what had one in earlier passes that are not summed over replicas yet, if there are any
        self._before: set[int] | None = None
        self._reduced = False

    def release(self) -> None:
        """Let go of the units."""
        for uses in self._uses:
            uses.release()
        self._uses, self._members = [], []

    def _complete(self, group: Any, last: bool) -> None:
        """Before a unit's gradients are reduced: zeros where this rank has none."""
        self._reduced = True
        members = [member for member in sharding_compat.members_of(group) if self._trained(member)]
        missing = [member for member in members if not sharding_compat.has_unsharded_gradient(member)]
        self._used |= {id(member) for member in members} - {id(member) for member in missing}
        if len(missing) == len(members):
            if not last:  # of a unit that ran twice, all gradients come with the first forward
                return
            if not sharding_compat.in_backward_pass(group):
                self._skipped |= set(map(id, members))
                if not sharding_compat.holds_sums_of_shards(group):
                    return
        for member in missing:
            if sharding_compat.shard_of(member).grad is None:
                self._missed.add(id(member))
            sharding_compat.zero_unsharded_gradient(member)

    @staticmethod
    def _trained(member: Any) -> bool:
        return sharding_compat.shard_of(member).requires_grad

    def finish_backward(self) -> None:
        """After a backward pass: take the gradient away from parameters that no rank used in the window.

        Raises:
            PlanError: this rank did not run a unit that another one ran, whose weights were then mistaken for others.
        """
        for uses in self._uses:
            uses.reset()
        if not self._reduced:
            return
        rows = [self._used] if self._before is None else [self._used, self._used | self._before]
        flags = torch.tensor([[id(one) in used for one in self._members] for used in rows], dtype=torch.uint8)
        # From pinned memory, so that nothing waits for the device.
        there = (flags.pin_memory() if self._device.type == "cuda" else flags).to(self._device, non_blocking=True)
        max_over_ranks_(there)
        absent = self._skipped - self._used
        if self._missed or absent:
            by_row = there.tolist()
            for member, name, used, in_window in zip(self._members, self._names, by_row[0], by_row[-1], strict=True):
                if used and id(member) in absent:
                    raise PlanError([ranks_apart(f"the unit of {name!r}, which ran on some ranks only")])
                if not in_window and id(member) in self._missed:
                    sharding_compat.shard_of(member).grad = None
        self._before = None if all(uses.ends_window() for uses in self._uses) else rows[-1]
        self._used, self._missed, self._skipped, self._reduced = set(), set(), set(), False


class PipelineEngine(StepEngine):
    """Carries a policy out where gradients are those of one stage; the flag is the maximum over all of them."""

    holds = "every process holds a stage of the layers"
    #: Lightning's ``grad_norm``, which would be of one stage alone, is refused
    hook_watch = WholeNorms(pieces="under pipeline parallelism, whose ranks hold the gradients of one stage")
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
