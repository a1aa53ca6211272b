"""The step on one device and under DistributedDataParallel: every rank holds whole parameters and whole gradients."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mp.compat.lightning import Strategy, trainer_of
from lightning_mp.engines import bare_backward, closures, reduce
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import Faults
from lightning_mp.numerics import grads
from lightning_mp.numerics.no_op_scaler import NoOpScaler
from lightning_mp.numerics.scaler import LossScaler


class EagerEngine(StepEngine):
    """Carries a policy out where gradients are whole."""

    holds = "every process holds all parameters"
    _ddp: DistributedDataParallel | None = None

    def may_be_reverted(self) -> bool:
        """Under loss scaling: there LBFGS and its kind are refused."""
        return isinstance(self.scaler, LossScaler)

    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Refuse optimizers that evaluate the closure themselves under loss scaling."""
        if isinstance(self.scaler, LossScaler):
            closures.refuse_under_scaling(filter(self.steps_with_closure, optimizers), self.policy, faults)

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, and set in which dtype DDP sums gradients."""
        super().connect(model, optimizers)
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        if self._ddp is not None and reduce.needs_hook(self._ddp, self.policy.reduce_dtype):
            reduce.reduce_in(self._ddp, self.policy.reduce_dtype)

    def train_others(self) -> None:
        """DDP leaves the gradients of parameters that are unfrozen in the midst of a run unsummed unless it is told."""
        if self._ddp is not None:
            reduce.sum_anew(self._ddp, self.policy.reduce_dtype)

    def _bare_passes(self) -> AbstractContextManager[None]:
        """Under manual optimization DDP sums what it is prepared for: ``manual_backward`` does so, and this."""
        trainer = trainer_of(self._module)
        if self._ddp is None or trainer is None or trainer.lightning_module.automatic_optimization:
            return super()._bare_passes()
        return bare_backward.found(self._unannounced, partial(_summed, trainer.strategy))

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, in fp32."""
        self.last_norm = grads.clip_grad_norm_(grads.parameters_of(optimizer), max_norm)

    def step(self, optimizer: Optimizer, *, closure: closures.Evaluated | None = None, **kwargs: Any) -> Any:
        """As the base does; what rounds stochastically rounds alike on every rank, else their weights would part."""
        with self._drawing_alike(optimizer):
            return super().step(optimizer, closure=closure, **kwargs)

    @contextmanager
    def _drawing_alike(self, optimizer: Optimizer) -> Generator[None, None, None]:
        if not (self.distributed and getattr(optimizer, "bf16_stochastic_round", False)):  # torchao's optimizers
            yield
            return
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.step_counter.attempts)
            yield

    def step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """A step of an optimizer that evaluates the closure itself (LBFGS), undone if a gradient was not finite."""
        scaler = self.scaler
        assert isinstance(scaler, NoOpScaler), "refused under loss scaling"
        parameters, before = grads.parameters_of(optimizer), closures.Before(optimizer)
        found = torch.zeros((), dtype=torch.float32, device=self.device)

        def watched() -> Any:
            result = closure()
            scaler.check_(parameters, found)
            return result

        with scaler.flags.stepping():
            result = optimizer.step(watched, **kwargs)
        scaler.flags.reduce_(found)
        if self.policy.nonfinite.action == "ignore":
            found.zero_()
        scaler.note_step(optimizer, found)
        if self.policy.nonfinite.action != "ignore" and self.step_counter.step_skipped:
            before.restore()
        self.count()
        return result


@contextmanager
def _summed(strategy: Strategy, tensors: Any) -> Generator[None, None, None]:
    strategy.pre_backward(tensors)
    yield
    strategy.post_backward(tensors)
