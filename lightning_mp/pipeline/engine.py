"""The step where each rank holds a stage of the layers: the norm is that of all stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from lightning_mp.compat.lightning import trainer_of
from lightning_mp.fsdp2.shard_watch import sum_total_norms
from lightning_mp.numerics import grads
from lightning_mp.plan.engine import StepEngine


class PipelineEngine(StepEngine):
    """Carries a policy out where gradients are those of one stage; the flag is the maximum over all of them."""

    holds = "every process holds a stage of the layers"
    evaluates_once = "under pipeline parallelism, which would run the schedule again"
    steps = (("a stage", "a stage's parameters alone"), ("DTensors", "sharded parameters"))

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers; from then on ``clip_grad_norm_`` on a stage's gradients is by the norm of all."""
        super().connect(model, optimizers)
        if optimizers:
            self._connected.enter_context(sum_total_norms(self, self._stages))

    def _stages(self) -> grads.Groups:
        return (cast("Any", trainer_of(self._module)).strategy.stage_group,)

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the norm over all stages, in fp32."""
        parameters = grads.parameters_of(optimizer)
        own = grads.global_norm(parameters, self.device)
        self.last_norm = grads.over_shards(own, 2.0, self._stages())
        grads.clip_to_(parameters, max_norm, self.last_norm)
