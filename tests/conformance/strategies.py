"""The columns of the matrix, and how each becomes Trainer arguments.

``ddp@pytorch_lightning`` is the strategy ``ddp`` in processes that import Lightning under that name.
"""

from datetime import timedelta
from typing import Any

from conformance import HOST
from lightning_mp import make_strategy
from lightning_mp.compat.lightning import host as used

STRATEGIES = (
    "single", "ddp", "ddp@pytorch_lightning", "fsdp2", "hsdp", "fsdp1", "deepspeed_zero1", "deepspeed_zero2",
    "deepspeed_zero3", "fsdp2_offload", "deepspeed_zero2_offload", "deepspeed_zero3_offload", "pipeline",
)  # fmt: skip
MICROBATCHES = 2
#: a rank that waits longer for the other has lost it
TIMEOUT = timedelta(seconds=60)


def plain(strategy: str) -> str:
    return strategy.partition("@")[0]


def host(strategy: str) -> str:
    """The copy of Lightning that it runs under: what is after the ``@``."""
    return strategy.partition("@")[2] or "lightning.pytorch"


def environment(strategy: str) -> dict[str, str]:
    return {HOST: host(strategy)} if "@" in strategy else {}


def world(strategy: str) -> int:
    return 1 if strategy == "single" else 2


def trainer_arguments(strategy: str, plan: Any, **options: Any) -> dict[str, Any]:
    """What a Trainer needs to run ``plan`` under ``strategy``, DDP and FSDP2 with these options."""
    assert used() == host(strategy), "the process imported the other copy of Lightning"
    shared = {"plugins": [plan], "devices": world(strategy), "use_distributed_sampler": False}
    if strategy == "single":
        return shared
    # one node has one replica by default: with two, gradients are summed over both mesh dimensions
    # a stage a process; a micro-batch is what another strategy's rank has of a batch
    own: dict[str, Any] = {
        "hsdp": {"device_mesh": (2, 1)}, "pipeline": {"microbatches": MICROBATCHES}, "ddp": options, "fsdp2": options,
    }.get(plain(strategy), {})  # fmt: skip
    return {**shared, "strategy": make_strategy(plain(strategy), plan, timeout=TIMEOUT, **own)}
