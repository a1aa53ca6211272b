"""What a strategy is called, and between how many ranks it splits the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from lightning_mp.compat.lightning import Strategy

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


def name_of(strategy: str | Strategy) -> str:
    """The name that ``make_strategy`` knows it by; of a class that it does not, the class's."""
    if isinstance(strategy, str):
        return strategy.lower().removeprefix("mp_")
    kind, of = type(strategy).__name__, _any(strategy)
    if "DeepSpeed" in kind:
        zero = of.config["zero_optimization"]
        kind = f"deepspeed_zero{zero['stage']}"
        offloads = any("offload" in key and value for key, value in zero.items())
    else:
        offloads = getattr(getattr(of, "sharding", of), "cpu_offload", None)
        offloads = bool(getattr(offloads, "offload_params", offloads))
    return _NAMES.get(kind, kind) + ("_offload" if offloads else "")


def degrees(strategy: str | Strategy, ranks: int) -> tuple[int, int]:
    """Of so many ranks those that shard the weights between them, and those that split each layer."""
    if hasattr(strategy, "degrees"):
        _, shards, tensor = _any(strategy).degrees(ranks)
        return shards, tensor
    return ranks, 1


def trained(module: nn.Module) -> list[int]:
    """Numbers of each parameter that is trained."""
    return [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]


def _any(strategy: Any) -> Any:
    return strategy
