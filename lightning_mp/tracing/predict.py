"""``predict_memory``: the peak of one rank, traced where that is possible, by formula where it is not."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.checks import check_versions
from lightning_mp.compat.lightning import LightningModule, Strategy
from lightning_mp.compat.torch_fake import leaves, mapped
from lightning_mp.compat.transformers import block_classes
from lightning_mp.errors import Faults, PlanError, one_line
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.planner import ModelShape, estimate
from lightning_mp.planner.memory import PARTS, MemoryPrediction, degrees, held, name_of
from lightning_mp.policy import Checkpointing, PrecisionPolicy
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.strategies.factory import make_strategy
from lightning_mp.tracing.run import traced

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
        devices: ranks, of which the first is predicted.
        trainer_args: of the Trainer's arguments those that change memory, such as ``accumulate_grad_batches``.

    Raises:
        PlanError: what the Trainer would refuse too.
    """
    _check(module, plan, devices)
    common, built, ranks = dict(trainer_args or {}), cast("Any", strategy), int(devices)
    try:
        if isinstance(strategy, str) and name_of(strategy) not in _REPLICATED:
            built = make_strategy(strategy, plan)
        name = name_of(built)
        if name in _REPLICATED:
            return _replicated(traced(module, batch, plan, {**common, "devices": 1}), module, plan.policy, ranks)
        if name.startswith("deepspeed"):
            return by_formula(module, batch, plan, built, ranks, "DeepSpeed copies and partitions weights itself")
        if name == "pipeline":
            return by_formula(module, batch, plan, built, ranks, "a pipeline's ranks run different stages")
        return traced(module, batch, plan, {**common, "strategy": built, "devices": ranks})
    except PlanError:
        raise
    except Exception as error:  # of torch, of Lightning, of the user's own code
        return by_formula(module, batch, plan, built, ranks, why(error))


def _check(module: object, plan: object, devices: object) -> None:
    with Faults("predict_memory") as faults:
        if not isinstance(module, LightningModule):
            faults.add(f"module={type(module).__name__}", "a LightningModule", "wrap the network in one")
        if not isinstance(plan, MixedPrecisionPlan):
            faults.add(f"plan={plan!r}", "a MixedPrecisionPlan", "write MixedPrecisionPlan('bf16-mixed')")
        faults.whole("devices", devices, 1, "write the number of ranks")
        check_versions(faults, "torch", "lightning")


def why(error: BaseException) -> str:
    """What could not be traced, by the operator's name where torch says it, and where that was."""
    said = one_line(error)
    operator = re.search(r"\b(?:aten|prims|[a-z_0-9]+)\.[a-z_0-9]+\.[a-z_A-Z0-9]+\b", said)
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.name} raised {type(error).__name__}"
    return f"{place}: {operator.group() if operator else said[:160]} ({Path(last.filename).name}:{last.lineno})"


# ---------------------------------------------------------------------- from a trace


def _replicated(found: MemoryPrediction, module: nn.Module, policy: PrecisionPolicy, ranks: int) -> MemoryPrediction:
    """DDP keeps buckets of the gradients' size next to them, and until the next backward what it summed instead."""
    if ranks == 1:
        return found
    kept, size = found.held["gradients"], to_torch(policy.reduce_dtype).itemsize
    another = 6 - size  # of 2 and 4 bytes a number the other
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    summed = (kept - size * trained) // (another - size)
    other = kept + size * max(summed, 0)
    parts = {**found.parts, "other": found.parts["other"] + other}
    return replace(found, peak_bytes=found.peak_bytes + other, parts=parts)


# ---------------------------------------------------------------------- without one


def by_formula(
    module: nn.Module, batch: Any, plan: MixedPrecisionPlan, strategy: str | Strategy, ranks: int, reason: str
) -> MemoryPrediction:
    """The formula of :func:`lightning_mp.planner.estimate`; without a transformers config only what is held."""
    policy, notes = plan.policy, [f"not traced: {reason}"]
    params = sum(parameter.numel() for parameter in module.parameters())
    config = next((inner.config for inner in module.modules() if hasattr(inner, "config")), None)
    name, (shards, split) = name_of(strategy), degrees(strategy, ranks)
    kind = "fsdp2" if name == "pipeline" and shards > 1 else name
    found: dict[str, float] = dict(
        zip(_HELD, (params / split * size for size in held(policy.precision, kind, shards)), strict=True)
    )
    tokens = next((leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)), None)
    rows, length = (1, None) if tokens is None else (tokens.shape[0], tokens.shape[1] if tokens.dim() > 1 else None)
    try:
        estimated = estimate(
            ModelShape.from_config(config, params=params, seq_len=length),
            gpu="h100-80",
            gpus=ranks,
            strategy=kind,
            tensor=1 if name == "pipeline" else split,
            pipeline=split if name == "pipeline" else 1,
            precision=policy.precision,
            micro_batch=rows,
            checkpointing="none" if policy.checkpointing is None else policy.checkpointing.mode,
        ).parts
        # The strategy's own mesh (HSDP's) is known here, what ZeRO keeps of an embedding there.
        found = {**found, **estimated} if name.startswith("deepspeed") else {**estimated, **found}
        notes.append("by the formula of a decoder with AdamW")
    except (PlanError, TypeError):
        notes.append("no transformers config: activations are not counted, and the optimizer is taken for AdamW")
    found["buffers"] = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    parts = {part: round(found.get(part, 0)) for part in PARTS}
    stays = {part: parts[part] for part in (*_HELD, "buffers")}
    return MemoryPrediction(sum(parts.values()), parts, stays, "formula", tuple(notes))


# ---------------------------------------------------------------------- what fits a device

#: more are not tried
MOST_ROWS = 4096
_TRIES = 8
Mode = Literal["none", "selective", "full"]
StrategyFor = Callable[[MixedPrecisionPlan], Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """One way of checkpointing: the prediction for the batch at hand, and how many rows of it fit; 0: none do."""

    checkpointing: Mode
    prediction: MemoryPrediction
    rows: int


def rows_of(batch: Any) -> int:
    """How many rows ``batch`` has: the size of its first tensor."""
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def with_rows(batch: Any, rows: int) -> Any:
    """``batch`` with so many rows, its own again and again."""
    given = rows_of(batch)
    chosen = torch.arange(rows) % given
    return mapped(
        lambda leaf: leaf[chosen] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == given else leaf, batch
    )


def fits(
    module: nn.Module,
    batch: Any,
    plan: MixedPrecisionPlan,
    memory: float,
    strategy: StrategyFor = lambda _: "auto",
    **run: Any,
) -> Iterator[Fit]:
    """Each way of checkpointing, the one that recomputes least first, on a device of ``memory`` bytes.

    Other ways than the plan's own are for its modules, or else for the blocks that a transformers model names.
    ``strategy`` makes the strategy for a plan; ``run`` goes to ``predict_memory``.
    """
    own = plan.policy.checkpointing
    patterns = _blocks(module) if own is None else own.modules
    modes: tuple[Mode, ...] = ("none", "selective", "full") if patterns else ("none",)
    for mode in modes:
        recomputed = None if mode == "none" else Checkpointing(modules=patterns, mode=mode)
        there = MixedPrecisionPlan.from_policy(replace(plan.policy, checkpointing=recomputed))

        def predict(rows: int, there: MixedPrecisionPlan = there) -> MemoryPrediction:
            return predict_memory(module, with_rows(batch, rows), there, strategy=strategy(there), **run)

        found = predict(rows_of(batch))
        yield Fit(mode, found, most_rows(lambda rows: predict(rows).peak_bytes, memory, rows_of(batch), found))


def _blocks(module: nn.Module) -> tuple[str, ...]:
    named = {name for inner in module.modules() for name in block_classes(inner)}
    return tuple(sorted(named & {type(inner).__name__ for inner in module.modules()}))


def most_rows(peak: Callable[[int], int], memory: float, rows: int, known: MemoryPrediction) -> int:
    """The most rows whose ``peak`` is not above ``memory``: guessed on a line from what is held without any, tried."""
    low, high = 0, MOST_ROWS + 1  # so many fit, so many do not
    held, guess, size = sum(known.held.values()), rows, known.peak_bytes
    for _ in range(_TRIES):
        low, high = (guess, high) if size <= memory else (low, guess)
        if high - low <= 1:
            break
        line = int(guess * (memory - held) / max(size - held, 1))
        guess = min(max(line, low + 1), high - 1)
        size = peak(guess)
    return low
