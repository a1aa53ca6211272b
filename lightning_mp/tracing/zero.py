"""DeepSpeed's ZeRO, which cannot be traced: what it partitions and copies, of what one device holds.

DeepSpeed 0.16 to 0.19, read and measured. Every stage keeps this rank's part of the trained weights a second time, and
moments of it; its backward pass fills whole buckets. Stages 1 and 2 keep gradients, this rank's, from the backward pass
to the step, and hold half copies of the weights of which one device has autocast make some; stage 3 keeps gradients
always, small weights gathered, and at the peak all that it will use again soon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_mp.errors import Faults
from lightning_mp.modules import half_weights, pins
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.planner.named import name_of
from lightning_mp.planner.prediction import MemoryPrediction
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.deepspeed.checks import check_storage
from lightning_mp.tracing.run import Traced

#: numbers that stage 3 keeps gathered if they are used again so soon; of a weight that it always does
_SOON, _SMALL = 1_000_000_000, 100_000
_NOTE = "DeepSpeed cannot be traced: what it partitions and copies is by formula, from the trace of one device"


def trained(module: nn.Module) -> list[int]:
    """Numbers of each parameter that is trained."""
    return [parameter.numel() for parameter in module.parameters() if parameter.requires_grad]


def known(strategy: Any) -> bool:
    """Whether it is a strategy of DeepSpeed's that says how it partitions."""
    return not isinstance(strategy, str) and name_of(strategy).startswith("deepspeed")


def check(module: nn.Module, plan: MixedPrecisionPlan, strategy: Any) -> None:
    """Before the trace of one device, which would run it.

    Raises:
        PlanError: weights stored in half precision, where ZeRO keeps fp32 copies.
    """
    stage = strategy.config["zero_optimization"]["stage"]
    with Faults("predict_memory") as faults:
        pin_map = pins.resolve(module, plan.policy.pins, faults)
        check_storage(plan.policy, pin_map, module, stage, bool(_offloaded(strategy)), faults)


def _halved(module: nn.Module, plan: MixedPrecisionPlan, strategy: Any) -> int:
    """Bytes less for weights that are held as half copies."""
    policy = plan.policy
    if strategy.config["zero_optimization"]["stage"] == 3 or _offloaded(strategy) or not strategy.half_copies:
        return 0
    weights = half_weights.survey(module, pins.resolve(module, policy.pins, Faults("predict_memory")), policy)
    copied = [one.tensor for one in half_weights.copied(weights, module)]
    return sum(one.numel() * (one.element_size() - to_torch(policy.compute_dtype).itemsize) for one in copied)


def held(
    alone: Mapping[str, int], module: nn.Module, plan: MixedPrecisionPlan, strategy: Any, ranks: int
) -> dict[str, int]:
    """Weights, gradients and optimizer state in bytes on one of ``ranks``; ``alone`` is what one device holds."""
    zero, numbers = strategy.config["zero_optimization"], [parameter.numel() for parameter in module.parameters()]
    weights = alone["parameters"]
    size = weights // sum(numbers)
    copies = size * sum(trained(module)) // ranks
    found = {"parameters": weights - _halved(module, plan, strategy), "gradients": 0}
    found["optimizer_state"] = alone["optimizer_state"] // ranks + copies
    stage = zero["stage"]
    if stage == 3:
        small = zero.get("stage3_param_persistence_threshold", _SMALL)
        whole = size * sum(number for number in numbers if number <= small)
        found |= {"parameters": weights // ranks + whole, "gradients": copies}
    return found | dict.fromkeys(_offloaded(strategy), 0)


def _offloaded(strategy: Any) -> tuple[str, ...]:
    if not name_of(strategy).endswith("_offload"):
        return ()
    stage = strategy.config["zero_optimization"]["stage"]
    return ("optimizer_state", "parameters", "gradients") if stage == 3 else ("optimizer_state",)


def partitioned(
    found: Traced, module: nn.Module, plan: MixedPrecisionPlan, strategy: Any, ranks: int
) -> MemoryPrediction:
    """A rank's prediction, from the trace of one device."""
    zero, numbers = strategy.config["zero_optimization"], [parameter.numel() for parameter in module.parameters()]
    own = held(found.held, module, plan, strategy, ranks)
    third = zero["stage"] == 3
    bucket = max(int(zero["reduce_bucket_size"]), *numbers)
    other = bucket * 4 * (1 if third or not zero.get("overlap_comm") else 2)
    parts = found.without_gradients(0 if third else 1 / ranks)
    if third:
        weights = found.held["parameters"]
        soon = weights // sum(numbers) * zero.get("stage3_max_reuse_distance", _SOON)
        other += min(soon, max(weights - own["parameters"] + weights // ranks, 0))
    for part in ("parameters", "optimizer_state", *(("gradients",) if third else ())):
        parts[part] = own[part]
    parts["other"] += other
    if plan.policy.checkpointing is None:  # else one device has let go of its copies too
        parts["activations"] -= _halved(module, plan, strategy)
    return MemoryPrediction(sum(parts.values()), parts, {**found.held, **own}, "traced, and a formula", (_NOTE,))
