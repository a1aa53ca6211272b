"""``predict_memory``: the peak of one rank, traced where that is possible, by formula where it is not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from lightning_mp.compat.lightning import LightningModule, Strategy
from lightning_mp.compat.torch_fake import FAKES, leaves
from lightning_mp.errors import Faults, PlanError, one_line
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.planner import ModelShape, estimate
from lightning_mp.planner.memory import HELD, STRATEGIES
from lightning_mp.planner.named import degrees, name_of
from lightning_mp.planner.prediction import PARTS, MemoryPrediction
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.factory import make_strategy
from lightning_mp.tracing import zero
from lightning_mp.tracing.run import Traced, traced
from lightning_mp.tracing.stages import first_stage

if TYPE_CHECKING:
    from lightning_mp.strategies.pipeline.strategy import PlanPipelineStrategy

#: strategies under which every rank holds all of the model, and runs as one device does
_REPLICATED = ("auto", "ddp")
_HELD: tuple[str, ...] = ("parameters", "gradients", "optimizer_state")


def predict_memory(
    module: nn.Module,
    batch: Any,
    plan: MixedPrecisionPlan,
    *,
    strategy: str | Strategy = "auto",
    devices: int = 1,
    trainer_args: Mapping[str, Any] | None = None,
) -> MemoryPrediction:
    """The memory that one rank needs at the peak of its first two optimizer steps; nothing of that size is allocated.

    The Trainer, the plan and the strategy run two steps on a copy of ``module`` whose tensors have no memory, and every
    storage is counted while it lives. Weights may be on the meta device. What the module computes from numbers that
    are not known then is not known: a float that it reads is 1, a bool False; integers of the batch are known.

    Args:
        module: a LightningModule; it, the generators and the process are afterwards as before.
        batch: what ``training_step``, or ``pipeline_batch``, gets on one rank.
        plan: what the run would carry out.
        strategy: a name for ``make_strategy``, or what it returned, which this uses up.
        devices: ranks, of which the first is looked at.
        trainer_args: of the Trainer's arguments those that change memory, such as ``accumulate_grad_batches``.

    Raises:
        PlanError: what the Trainer would refuse too.
    """
    _check(module, plan, devices)
    common, built = dict(trainer_args or {}), cast("Any", strategy)
    try:
        if isinstance(strategy, str) and name_of(strategy) not in _REPLICATED:
            built = make_strategy(strategy, plan)
        name = name_of(built)
        if name == "pipeline":
            pipeline = cast("PlanPipelineStrategy", built)
            layout = pipeline.layout_on(int(devices))
            if layout.per_rank > 1 or (pipeline.shard and layout.stages < devices):
                return by_formula(module, batch, plan, built, int(devices), "several stages on a rank, or sharded ones")
            return first_stage(cast("LightningModule", module), batch, plan, layout, common)
        if name not in _REPLICATED and not name.startswith("deepspeed"):
            return _as_traced(traced(module, batch, plan, {**common, "strategy": built, "devices": int(devices)}))
        if name not in _REPLICATED:
            zero.check(module, plan, built)
        alone = traced(module, batch, plan, {**common, "devices": 1})
        if name in _REPLICATED:
            return _replicated(alone, module, plan.policy, int(devices))
        return zero.partitioned(alone, module, plan, built, int(devices))
    except PlanError:
        raise
    except Exception as error:  # of torch, of Lightning, of the user's own code
        return by_formula(module, batch, plan, built, int(devices), why(error))


def _check(module: object, plan: object, devices: object) -> None:
    with Faults("predict_memory") as faults:
        if not isinstance(module, LightningModule):
            faults.add(f"module={type(module).__name__}", "a LightningModule", "wrap the network in one")
        if not isinstance(plan, MixedPrecisionPlan):
            faults.add(f"plan={plan!r}", "a MixedPrecisionPlan", "write MixedPrecisionPlan('bf16-mixed')")
        faults.whole("devices", devices, 1, "write the number of ranks")
        FAKES.check(faults)


def why(error: BaseException) -> str:
    """What could not be traced, by the operator's name where torch says it."""
    said = one_line(error)
    operator = re.search(r"\b(?:aten|prims|[a-z_0-9]+)\.[a-z_0-9]+\.[a-z_A-Z0-9]+\b", said)
    return f"{type(error).__name__}: {operator.group() if operator else said[:160]}"


# ---------------------------------------------------------------------- from a trace


def _as_traced(found: Traced) -> MemoryPrediction:
    return MemoryPrediction(found.peak_bytes, found.parts, found.held, "traced", found.notes)


def _replicated(found: Traced, module: nn.Module, policy: PrecisionPolicy, ranks: int) -> MemoryPrediction:
    """DDP keeps buckets of the gradients' size beside them, and until the next backward what it summed instead."""
    other = 0
    if ranks > 1:
        kept, size = found.held["gradients"], to_torch(policy.reduce_dtype).itemsize
        elsewhere = 6 - size  # of 2 and 4 bytes a number the other
        summed = (kept - size * sum(zero.trained(module))) // (elsewhere - size)
        other = kept + size * max(summed, 0)
    parts = {**found.parts, "other": found.parts["other"] + other}
    return MemoryPrediction(found.peak_bytes + other, parts, found.held, "traced", found.notes)


# ---------------------------------------------------------------------- without one


def by_formula(
    module: nn.Module, batch: Any, plan: MixedPrecisionPlan, strategy: str | Strategy, ranks: int, reason: str
) -> MemoryPrediction:
    """The formula of :func:`lightning_mp.planner.estimate`; without a transformers config only what is held."""
    policy, notes = plan.policy, [f"not traced: {reason}"]
    params = sum(parameter.numel() for parameter in module.parameters())
    config = next((inner.config for inner in module.modules() if hasattr(inner, "config")), None)
    tokens = next((leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)), None)
    name, (shards, parts_of) = name_of(strategy), degrees(strategy, ranks)
    kind = STRATEGIES["fsdp2" if name == "pipeline" and shards > 1 else name if name in STRATEGIES else "auto"]
    whole = dict(zip(_HELD, (params * size for size in HELD.get(policy.precision, HELD["32-true"])), strict=True))
    split = dict(zip(_HELD, (kind.weights, kind.gradients, kind.optimizer), strict=True))
    held = {part: size // parts_of // (shards if split[part] else 1) for part, size in whole.items()}
    if zero.known(strategy):
        held = zero.held(whole, module, plan, strategy, ranks)
    held["buffers"] = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    parts = dict.fromkeys(PARTS, 0) | held
    try:
        rows, length = (1, None) if tokens is None else (tokens.shape[0], tokens.shape[1] if tokens.dim() > 1 else None)
        said = estimate(
            ModelShape.from_config(config, params=params, seq_len=length),
            gpu="h100-80",
            gpus=ranks,
            strategy=name,
            tensor=1 if name == "pipeline" else parts_of,
            pipeline=parts_of if name == "pipeline" else 1,
            precision=policy.precision,
            micro_batch=rows,
            checkpointing="none" if policy.checkpointing is None else policy.checkpointing.mode,
        ).parts
        parts |= {part: round(size) for part, size in said.items() if part not in held}
        notes.append("by the formula of a decoder with AdamW")
    except (PlanError, TypeError):
        notes.append("no transformers config: activations are not counted, and the optimizer is taken for AdamW")
    return MemoryPrediction(sum(parts.values()), parts, held, "formula", tuple(notes))
