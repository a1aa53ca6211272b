"""Lightning's own FSDP2, FSDP1 and DeepSpeed strategies on two CPU processes, with nothing of this package in them."""

from datetime import timedelta
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, ParallelStrategy
from torch import nn

_WAIT = {"timeout": timedelta(seconds=60), "process_group_backend": "gloo"}


def fsdp2() -> ModelParallelStrategy:
    """FSDP2 over both processes; the LightningModule shards itself in ``configure_model``."""
    return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **_WAIT)


class _CpuFSDP(FSDPStrategy):
    """``FSDPStrategy`` on the CPU: Lightning refuses that for the class itself only."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        options: dict[str, Any] = {"mixed_precision": self.mixed_precision_config, **self.kwargs}
        strategy = self.sharding_strategy
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), sharding_strategy=strategy, cpu_offload=self.cpu_offload, **options
        )


def fsdp1(**options: Any) -> FSDPStrategy:
    """FSDP1 that writes sharded checkpoints."""
    return _CpuFSDP(state_dict_type="sharded", **_WAIT, **options)


class _CpuDeepSpeed(DeepSpeedStrategy):
    """``DeepSpeedStrategy`` without its checks for CUDA; DeepSpeed itself finds the CPU and gloo."""

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self.setup_distributed()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        import argparse

        import deepspeed

        engine, wrapped, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank),
            config=self.config,
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, wrapped


def deepspeed(stage: int, **config: Any) -> DeepSpeedStrategy:
    """DeepSpeed's ZeRO stage ``stage`` (0 to 3); ``config`` is put over what fp32 on gloo needs."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 8, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False, "zero_optimization": {"stage": stage}, **config,
    }  # fmt: skip
    return _CpuDeepSpeed(config=settings, **_WAIT)
