"""Which Lightning strategies a plan runs on, and what it refuses on them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy, Strategy
from torch import nn

from lightning_mp.errors import Faults
from lightning_mp.policy import PrecisionPolicy


def is_distributed(strategy: Strategy) -> bool:
    """Whether gradients are summed over ranks."""
    return isinstance(strategy, DDPStrategy)


def check(strategy: Strategy, policy: PrecisionPolicy, module: nn.Module, faults: Faults) -> None:
    """Note why the plan cannot run on ``strategy``."""
    # DeepSpeedStrategy is a DDPStrategy by inheritance only
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)) or isinstance(strategy, DeepSpeedStrategy):
        faults.add(
            f"strategy {type(strategy).__name__}",
            "a single device, or DDP: Trainer(strategy='auto') or Trainer(strategy='ddp')",
            "use strategy='ddp'; sharded strategies would change what the plan means",
        )
        return
    hook: Any = getattr(strategy, "_ddp_comm_hook", None)
    if hook is not None and _decides_dtype(hook, strategy):
        faults.add(
            f"DDPStrategy(ddp_comm_hook={getattr(hook, '__name__', hook)}) beside reduce_dtype={policy.reduce_dtype!r}",
            "one of the two to decide the dtype gradients are summed in",
            "remove the hook and set MixedPrecisionPlan(reduce_dtype='fp16'), or 'bf16'",
        )
    elif hook is not None and {policy.storage_dtype, *(pin.dtype for pin in policy.pins)} != {policy.reduce_dtype}:
        faults.add(
            f"DDPStrategy(ddp_comm_hook={getattr(hook, '__name__', hook)}) where gradients are summed in another dtype "
            "than their own",
            "no communication hook where parameters or pins are not stored in reduce_dtype",
            "remove the hook",
        )


def _decides_dtype(hook: Any, strategy: Any) -> bool:
    names = {getattr(item, "__name__", "") for item in (hook, getattr(strategy, "_ddp_comm_wrapper", None))}
    return any("compress" in name for name in names)
