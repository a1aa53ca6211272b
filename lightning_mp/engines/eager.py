"""The step on one device and under DistributedDataParallel: every rank holds whole parameters and whole gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mp.engines import reduce
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.optimizer_facts import is_known_to_evaluate_again
from lightning_mp.errors import Faults
from lightning_mp.numerics import grads


class EagerEngine(StepEngine):
    """Carries a policy out where gradients are whole."""

    holds = "every process holds all parameters"
    _ddp: DistributedDataParallel | None = None

    def may_be_reverted(self) -> bool:
        """Under loss scaling: there LBFGS and its kind are refused."""
        return self.scaler.enabled

    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Refuse optimizers that evaluate the closure themselves under loss scaling."""
        if self.scaler.enabled:
            faults.extend(self._again_under_scaling(one) for one in optimizers if is_known_to_evaluate_again(one))

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

    def unscale(self, optimizer: Optimizer) -> None:
        """As the base does.

        Raises:
            PlanError: DDP was never asked to reduce gradients, as a bare ``loss.backward()`` does not ask it.
        """
        if self._ddp is not None:
            self._require_tracked("DDP")
        super().unscale(optimizer)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, in fp32."""
        self.last_norm = grads.clip_grad_norm_(grads.parameters_of(optimizer), max_norm)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """As the base does; what rounds stochastically rounds alike on every rank, else their weights would part."""
        if not (self.distributed and getattr(optimizer, "bf16_stochastic_round", False)):  # torchao's optimizers
            return super().step(optimizer, **kwargs)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(self.step_counter.attempts)
            return super().step(optimizer, **kwargs)
