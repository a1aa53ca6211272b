"""Where DeepSpeed's ZeRO optimizers keep what other strategies keep in parameters and ``.grad``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_mp.compat.lightning import Trainer


def optimizer_of(trainer: Trainer) -> Any:
    """ZeRO's optimizer, or ``None`` under another strategy."""
    return getattr(getattr(trainer.strategy, "deepspeed_engine", None), "optimizer", None)


def masters(trainer: Trainer) -> list[Tensor]:
    """The flat partitions that ZeRO steps, a copy of the parameters' own."""
    zero = optimizer_of(trainer)
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")  # stages 1 and 2; stage 3
    return [partition for name in names for partition in getattr(zero, name, [])]


def gradients(trainer: Trainer) -> list[Tensor]:
    """The gradient partitions ZeRO holds at the step; none under another strategy."""
    zero = optimizer_of(trainer)
    groups = getattr(zero, "averaged_gradients", {}).values()  # stages 1 and 2: lists of tensors by group
    flat = getattr(zero, "grad_partitions_flat_buffer", None)  # stage 3
    offloaded = [partition.grad for partition in masters(trainer)]
    held = [*(tensor for group in groups for tensor in group or ()), flat, *offloaded]
    return [tensor for tensor in held if tensor is not None]
