"""The step where each rank holds a stage of the layers: its gradients are whole, or FSDP2's shards of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_mp.compat.lightning import trainer_of
from lightning_mp.engines import optimizer_facts
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.shard_reads import WholeNorms, sum_total_norms
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.numerics import grad_norm, grads


class PipelineEngine(StepEngine):
    """Carries a policy out where gradients are those of one stage; the flag is the maximum over all of them."""

    holds = "every process holds a stage of the layers"
    _undo_norm: Callable[[], None] | None = None

    def may_be_reverted(self) -> bool:
        """No: the other stages are gone by then."""
        return False

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

    def user_hooks(self) -> AbstractContextManager[Any]:
        """Lightning's ``grad_norm``, which would be of one stage alone, is refused."""
        return WholeNorms(pieces="under pipeline parallelism, whose ranks hold the gradients of one stage")

    def evaluates_again(self, optimizer: Optimizer) -> None:
        """Refused: another evaluation would run the schedule again."""
        raise PlanError([_again(optimizer)])

    @property
    def _stages(self) -> grad_norm.Groups:
        trainer = trainer_of(self._module)
        strategy: Any = None if trainer is None else trainer.strategy
        return () if strategy is None else (strategy.stage_group,)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the norm over all stages, in fp32."""
        parameters = grads.parameters_of(optimizer)
        own = grad_norm.global_norm(parameters, self.device)
        self.last_norm = grad_norm.over_shards(own, 2.0, self._stages)
        grad_norm.clip_to_(parameters, max_norm, self.last_norm)


def _again(optimizer: Optimizer) -> Fault:
    return optimizer_facts.evaluates_again(optimizer, "under pipeline parallelism")
