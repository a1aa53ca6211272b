"""What a strategy is called, and between how many ranks it splits the model."""

from __future__ import annotations

from typing import Any

_NAMES = {
    "PlanDDPStrategy": "ddp",
    "DDPStrategy": "ddp",
    "SingleDeviceStrategy": "ddp",
    "PlanFSDP2Strategy": "fsdp2",
    "ModelParallelStrategy": "fsdp2",
    "PlanHSDPStrategy": "hsdp",
    "PlanFSDP1Strategy": "fsdp1",
    "FSDPStrategy": "fsdp1",
    "PlanPipelineStrategy": "pipeline",
}


def name_of(strategy: Any) -> str:
    """The name that ``make_strategy`` knows a strategy, or a name, by; of a class that it does not, the class's."""
    if isinstance(strategy, str):
        return strategy.lower().removeprefix("mp_")
    kind = type(strategy).__name__
    if "DeepSpeed" in kind:
        zero = strategy.config["zero_optimization"]
        kind = f"deepspeed_zero{zero['stage']}"
        offloads = any("offload" in key and value for key, value in zero.items())
    else:
        offloads = getattr(getattr(strategy, "sharding", strategy), "cpu_offload", None)
        offloads = bool(getattr(offloads, "offload_params", offloads))
    return _NAMES.get(kind, kind) + ("_offload" if offloads else "")


def degrees(strategy: Any, ranks: int) -> tuple[int, int]:
    """Of so many ranks those that shard the weights between them, and those that split layers, or share them out."""
    if hasattr(strategy, "degrees"):
        _, shards, tensor = strategy.degrees(ranks)
        return shards, tensor
    return ranks, 1
