"""The columns of the matrix, and how each becomes Trainer arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

STRATEGIES = (
    "single",
    "ddp",
    "fsdp2",
    "hsdp",
    "fsdp1",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "fsdp2_offload",
    "deepspeed_zero2_offload",
    "deepspeed_zero3_offload",
)
#: a rank that waits longer for the other has lost it
TIMEOUT = timedelta(seconds=60)


class NotBuiltError(Exception):
    """The package has no such strategy yet."""


def world(strategy: str) -> int:
    """How many processes it runs in."""
    return 1 if strategy == "single" else 2


def trainer_arguments(strategy: str, plan: Any) -> dict[str, Any]:
    """What a Trainer needs to run ``plan`` under ``strategy``."""
    shared = {"plugins": [plan], "devices": world(strategy), "use_distributed_sampler": False}
    if strategy == "single":
        return shared
    return {**shared, "strategy": _made(strategy, plan)}


def _made(strategy: str, plan: Any) -> Any:
    try:
        from lightning_mp import make_strategy
    except (ImportError, AttributeError) as error:
        if strategy == "ddp":
            from lightning.pytorch.strategies import DDPStrategy

            return DDPStrategy(timeout=TIMEOUT, process_group_backend="gloo")
        raise NotBuiltError(strategy) from error
    return make_strategy(strategy, plan)
