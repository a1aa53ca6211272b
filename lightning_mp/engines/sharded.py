"""The step where each rank holds a shard of every parameter: a DTensor (FSDP2, tensor parallel) or a flat view (FSDP1).

A shard is unscaled, checked and stepped as a whole parameter is; the norm and the replay have to know of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.torch import FSDP1_WRAPPER, is_compiled
from lightning_mp.engines import optimizer_facts
from lightning_mp.engines.base import Replay, StepEngine
from lightning_mp.engines.diagnosis import Verdict
from lightning_mp.engines.same_order import FirstForward
from lightning_mp.engines.shard_reads import ShardReads, WholeNorms, sum_total_norms
from lightning_mp.engines.unused import UnusedParameters
from lightning_mp.errors import Fault, Faults, NonFiniteError, PlanError
from lightning_mp.numerics import grad_norm, grads


class ShardedEngine(StepEngine):
    """Carries a policy out on sharded parameters."""

    holds = "every process holds a shard of every parameter"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        #: what ends what was put in the place of torch's functions
        self._undo: list[Callable[[], None]] = []
        #: the groups that plain gradients are split over
        self._flat_groups: grad_norm.Groups = ()
        self._unused: UnusedParameters | None = None
        self._first: FirstForward | None = None
        self._reads: ShardReads | None = None

    def may_be_reverted(self) -> bool:
        """No: what is sharded by then cannot be brought back, and keeping the originals would keep it whole."""
        return False

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
            units: dict[str, Any] = {
                f".{name}".replace(FSDP1_WRAPPER, "")[1:]: unit
                for name, unit in model.named_modules()
                if unit is not model and isinstance(unit, (FSDPModule, FullyShardedDataParallel))
            }
            compiled = any(map(is_compiled, model.modules()))
            self._first = FirstForward(model, units, self.device, compiled=compiled)
            self._unused = UnusedParameters(model, self.device) if optimizers else None

    def unscale(self, optimizer: Optimizer) -> None:
        """One pass over the local shards; the flag is reduced over every rank of every mesh dimension."""
        grad_norm.sum_partial_(grads.parameters_of(optimizer))
        super().unscale(optimizer)

    @contextmanager
    def _watch_shards(self, reads: AbstractContextManager[None]) -> Generator[None, None, None]:
        module = cast("nn.Module", self._module)
        if not self.distributed or any(map(is_compiled, module.modules())):
            with reads:
                yield
            return
        named = ((name.replace(f"{FSDP1_WRAPPER[1:]}.", ""), one) for name, one in module.named_parameters())
        units = (unit for unit in module.modules() if isinstance(unit, FullyShardedDataParallel))
        flat = {id(one) for unit in units for one, _ in sharding_compat.flat_members(unit)}
        self._reads = ShardReads(
            named, lambda one: isinstance(one, DTensor) or id(one) in flat, silent=bool(self._flat_groups)
        )
        with reads, self._reads:
            yield

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

    def before_backward(self, loss: Tensor, *, manual: bool) -> Tensor:
        """The loss, times the scale where there is one; the ranks compare their first losses."""
        if self._first is not None:
            self._first.before_backward(loss)
        return super().before_backward(loss, manual=manual)

    def before_reduction(self) -> None:
        """Before a collective of the user's, which in a first step other ranks have to be at too."""
        if self._first is not None:
            self._first.before_reduction()

    def after_backward(self, *, manual: bool) -> None:
        """Reduce partial gradients, and unscale them, before users look at them."""
        if self._unused is not None:
            self._unused.finish_backward()
        if manual:
            for optimizer in self.optimizers:
                grad_norm.sum_partial_(grads.parameters_of(optimizer))
        super().after_backward(manual=manual)

    def user_hooks(self) -> AbstractContextManager[Any]:
        """Norms of single gradients are those of whole ones."""
        pieces = "under FSDP1, whose ranks hold flat pieces of the gradients" if self._flat_groups else None
        return WholeNorms(pieces=pieces) if self.distributed else nullcontext()

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
        self.last_norm = grad_norm.global_norm(parameters, self.device, self._flat_groups)
        grad_norm.clip_to_(parameters, max_norm, self.last_norm)

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


def flat_groups(model: nn.Module | None) -> grad_norm.Groups:
    """The process group over which FSDP1 splits flat parameters, if it does."""
    if not isinstance(model, FullyShardedDataParallel):
        return ()
    group = model.process_group
    sharded = model.sharding_strategy is not ShardingStrategy.NO_SHARD
    return (group,) if group is not None and sharded and group.size() > 1 else ()
