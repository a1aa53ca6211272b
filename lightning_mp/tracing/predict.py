"""``predict_memory``: the peak of one rank, traced where that is possible, by formula where it is not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from lightning_mp.compat.lightning import LightningModule, Strategy
from lightning_mp.compat.torch_fake import FAKES, leaves
from lightning_mp.errors import Faults, PlanError, one_line
from lightning_mp.planner import ModelShape, estimate
from lightning_mp.planner.memory import HELD, STRATEGIES
from lightning_mp.planner.prediction import PARTS, MemoryPrediction
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.factory import make_strategy
from lightning_mp.tracing.run import Traced, traced
from lightning_mp.tracing.stages import first_stage

if TYPE_CHECKING:
    from lightning_mp.strategies.pipeline.strategy import PlanPipelineStrategy

#: strategies under which every rank holds all of the model, and runs as one device does
_REPLICATED = ("auto", "ddp")
#: what ZeRO-3 keeps gathered at most, in numbers, unless it is told otherwise
_LIVE = 1_000_000_000


def predict_memory(
    module: nn.Module,
    batch: Any,
    plan: MixedPrecisionPlan,
    *,
    strategy: str | Strategy = "auto",
    devices: int = 1,
    trainer_args: Mapping[str, Any] | None = None,
) -> MemoryPrediction:
    """The memory that one rank needs at the peak of its second optimizer step; nothing of that size is allocated.

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
    name = _name(strategy)
    common = dict(trainer_args or {})
    try:
        if name in _REPLICATED:
            return _replicated(traced(module, batch, plan, {**common, "devices": 1}), int(devices))
        if name.startswith("deepspeed"):
            built = make_strategy(strategy, plan) if isinstance(strategy, str) else strategy
            return _partitioned(traced(module, batch, plan, {**common, "devices": 1}), built, name, int(devices))
        if name == "pipeline":
            built = make_strategy(strategy, plan) if isinstance(strategy, str) else strategy
            pipeline = cast("PlanPipelineStrategy", built)
            layout = pipeline.layout_on(int(devices))
            if layout.per_rank > 1 or (pipeline.shard and layout.stages < devices):
                return by_formula(module, batch, plan, name, int(devices), "several stages on a rank, or sharded ones")
            return first_stage(cast("LightningModule", module), batch, plan, layout, common)
        return _as_traced(traced(module, batch, plan, {**common, "strategy": strategy, "devices": int(devices)}))
    except PlanError:
        raise
    except Exception as error:  # of torch, of Lightning, of the user's own code
        return by_formula(module, batch, plan, name, int(devices), why(error))


def _check(module: object, plan: object, devices: object) -> None:
    with Faults("predict_memory") as faults:
        if not isinstance(module, LightningModule):
            faults.add(f"module={type(module).__name__}", "a LightningModule", "wrap the network in one")
        if not isinstance(plan, MixedPrecisionPlan):
            faults.add(f"plan={plan!r}", "a MixedPrecisionPlan", "write MixedPrecisionPlan('bf16-mixed')")
        faults.whole("devices", devices, 1, "write the number of ranks")
        FAKES.check(faults)


def _name(strategy: str | Strategy) -> str:
    if isinstance(strategy, str):
        return strategy.lower().removeprefix("mp_")
    kind = type(strategy).__name__
    if "DeepSpeed" in kind:
        return f"deepspeed_zero{strategy.config['zero_optimization']['stage']}"  # type: ignore[index]
    if kind == "PlanPipelineStrategy":
        return "pipeline"
    return "ddp" if kind in ("PlanDDPStrategy", "DDPStrategy", "SingleDeviceStrategy") else kind


def why(error: BaseException) -> str:
    """What could not be traced, by the operator's name where torch says it."""
    said = one_line(error)
    operator = re.search(r"\b(?:aten|prims|[a-z_0-9]+)\.[a-z_0-9]+\.[a-z_A-Z0-9]+\b", said)
    return f"{type(error).__name__}: {operator.group() if operator else said[:160]}"


# ---------------------------------------------------------------------- from a trace


def _as_traced(found: Traced) -> MemoryPrediction:
    return MemoryPrediction(found.peak_bytes, found.parts, found.held, "traced")


def _replicated(found: Traced, ranks: int) -> MemoryPrediction:
    """DDP keeps buckets of the gradients' size beside them."""
    buckets = found.held["gradients"] if ranks > 1 else 0
    parts = {**found.parts, "other": found.parts["other"] + buckets}
    return MemoryPrediction(found.peak_bytes + buckets, parts, found.held, "traced")


def _partitioned(found: Traced, strategy: Any, name: str, ranks: int) -> MemoryPrediction:
    """ZeRO: what it partitions and copies, of what one device holds (DeepSpeed 0.16 to 0.19, read and measured).

    Stages 1 and 2 keep a flat copy of this rank's weights and fill whole buckets in the backward pass; stage 3 keeps
    three flat copies, the gradients and a bucket, and gathers as much as it may. None but stage 3 keeps gradients.
    """
    zero = strategy.config["zero_optimization"]
    stage = zero["stage"]
    weights = found.held["parameters"]
    own = weights // ranks
    buckets = 1 if stage == 3 or not zero.get("overlap_comm") else 2
    numbers = min(zero.get("stage3_max_live_parameters", _LIVE), weights // 4) if stage == 3 else 0
    held = {**found.held, "optimizer_state": found.held["optimizer_state"] // ranks}
    held |= {"parameters": own, "gradients": own} if stage == 3 else {"gradients": 0}
    copies = (3 if stage == 3 else 1) * own + buckets * int(zero["reduce_bucket_size"]) * 4 + 4 * numbers
    if name.endswith("_offload"):
        held |= dict.fromkeys(("optimizer_state", *(("parameters", "gradients") if stage == 3 else ())), 0)
    kept = ("parameters", "gradients", "optimizer_state")
    parts = {**found.parts, **{part: held[part] for part in kept}, "other": found.parts["other"] + copies}
    note = "DeepSpeed cannot be traced: what it partitions and copies is by formula, from the trace of one device"
    return MemoryPrediction(sum(parts.values()), parts, held, "traced, and a formula", (note,))


# ---------------------------------------------------------------------- without one


def by_formula(
    module: nn.Module, batch: Any, plan: MixedPrecisionPlan, name: str, ranks: int, reason: str
) -> MemoryPrediction:
    """The formula of :func:`lightning_mp.planner.estimate`; without a transformers config only what is held."""
    policy, notes = plan.policy, [f"not traced: {reason}"]
    params = sum(parameter.numel() for parameter in module.parameters())
    config = next((inner.config for inner in module.modules() if hasattr(inner, "config")), None)
    tokens = next((leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)), None)
    kind = STRATEGIES.get(name, STRATEGIES["auto"])
    weights, gradients, moments = HELD.get(policy.precision, HELD["32-true"])
    held = {
        "parameters": params * weights // (ranks if kind.weights else 1),
        "gradients": params * gradients // (ranks if kind.gradients else 1),
        "optimizer_state": params * moments // (ranks if kind.optimizer else 1),
        "buffers": sum(buffer.numel() * buffer.element_size() for buffer in module.buffers()),
    }
    parts = dict.fromkeys(PARTS, 0) | held
    try:
        rows, length = (1, None) if tokens is None else (tokens.shape[0], tokens.shape[1] if tokens.dim() > 1 else None)
        said = estimate(
            ModelShape.from_config(config, params=params, seq_len=length),
            gpu="h100-80",
            gpus=ranks,
            strategy=name,
            pipeline=ranks if name == "pipeline" else 1,
            precision=policy.precision,
            micro_batch=rows,
            checkpointing="none" if policy.checkpointing is None else policy.checkpointing.mode,
        ).parts
        parts |= {part: round(size) for part, size in said.items()}
        notes.append("by the formula of a decoder with AdamW")
    except (PlanError, TypeError):
        notes.append("no transformers config: activations are not counted, and the optimizer is taken for AdamW")
    return MemoryPrediction(sum(parts.values()), parts, held, "formula", tuple(notes))
