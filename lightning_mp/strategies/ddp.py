"""DistributedDataParallel under a plan: Lightning's strategy, and checkpoints of all strategies."""

import torch
from torch import nn

from lightning_mp.compat.lightning import DDPStrategy, Trainer, keep_sampler
from lightning_mp.plan.engine import EagerEngine
from lightning_mp.strategies.base import PlanStrategy


class PlanDDPStrategy(PlanStrategy, DDPStrategy):
    """Lightning's ``DDPStrategy`` under a plan.

    It resumes from sharded and DeepSpeed checkpoints too. It takes the keywords of ``DDPStrategy``.
    A single process runs as under Lightning's single-device strategy. It has no launcher, no
    process group and no wrapper, and it keeps the user's own sampler.
    """

    plan_engine = EagerEngine

    @property
    def _alone(self) -> bool:
        return self.num_nodes * self.num_processes == 1 == self.world_size

    def _configure_launcher(self) -> None:
        if not self._alone:  # with a launcher Lightning would refuse to run in a notebook
            super()._configure_launcher()

    def setup_distributed(self) -> None:
        if self._alone:
            self.set_world_ranks()
        else:
            super().setup_distributed()

    def setup(self, trainer: Trainer) -> None:
        if not self._alone:
            super().setup(trainer)
            return
        # DistributedSampler would draw another order than RandomSampler does, also for one process.
        keep_sampler(trainer)
        super(DDPStrategy, self).setup(trainer)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the model in DDP's wrapper, or as it is with a single process."""
        if self._alone:
            return model
        packed = [(one, one.data) for one in model.parameters() if one.is_floating_point() and one.itemsize == 1]
        for parameter, data in packed:
            parameter.data = data.view(torch.uint8)  # DDP broadcasts, and gloo knows no float8
        try:
            return super()._setup_model(model)
        finally:
            for parameter, data in packed:
                parameter.data = data
