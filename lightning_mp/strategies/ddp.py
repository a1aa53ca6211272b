"""DistributedDataParallel under a plan: Lightning's own strategy, and checkpoints of every other."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from lightning_mp.engines.eager import EagerEngine
from lightning_mp.strategies.carrying import CarriesCheckpoints


class PlanDDPStrategy(CarriesCheckpoints, DDPStrategy):
    """Lightning's ``DDPStrategy``, which also goes on from sharded and DeepSpeed checkpoints.

    A single process is not wrapped: it runs as on one device. Takes the keywords of ``DDPStrategy``.
    """

    plan_engine = EagerEngine

    def _setup_model(self, model: nn.Module) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        return model if self.world_size == 1 else super()._setup_model(model)
