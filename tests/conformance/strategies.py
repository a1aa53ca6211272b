"""The columns of the matrix, and how each becomes Trainer arguments."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning_mp import make_strategy

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


def world(strategy: str) -> int:
    """How many processes it runs in."""
    return 1 if strategy == "single" else 2


def trainer_arguments(strategy: str, plan: Any) -> dict[str, Any]:
    """What a Trainer needs to run ``plan`` under ``strategy``."""
    shared = {"plugins": [plan], "devices": world(strategy), "use_distributed_sampler": False}
    if strategy == "single":
        return shared
    # one node has one replica by default: with two, gradients are summed over both mesh dimensions
    own = {"device_mesh": (2, 1)} if strategy == "hsdp" else {}
    return {**shared, "strategy": make_strategy(strategy, plan, timeout=TIMEOUT, **own)}
