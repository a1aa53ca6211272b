"""Bytes on one GPU by formula: bytes a parameter by mode and strategy, bytes a token by checkpointing.

Sources: Rajbhandari et al. 2020 (ZeRO) for weights, gradients and optimizer state. Korthikanti et al. 2022 for
activations, without the scores that fused attention never stores. docs/reference/plan.md#modes for the dtypes.
"""

from dataclasses import dataclass, replace
from typing import Any

from lightning_mp.errors import in_bytes
from lightning_mp.planner.shape import PRECISIONS, Layout, ModelShape

#: The usable share of a device's memory, and the share kept free under tensor parallelism, for which the formula was a
#: third too low.
USABLE, TENSOR_HEADROOM = 0.95, 0.25
#: By mode: bytes a parameter of the weights, of their gradients, and of AdamW's two moments.
HELD = {mode: (2, 2, 4) if mode in ("bf16-true", "16-true") else (4, 4, 8) for mode in PRECISIONS}
#: the modes in which autocast computes all products; ``fp8-mixed`` has FP8 layers
_HALVED = ("bf16-mixed", "16-mixed")
#: A logit: the half one, its fp32 copy, the fp32 gradient, and that in half again; in fp32 the softmax instead.
_LOGIT = 12
#: the share of a block's activations that mode="selective" keeps: outputs of matrix products and of attention
_SELECTIVE = 0.5
#: the number of shard units that are gathered at once: the running one and the next
_GATHERED_UNITS = 2


@dataclass(frozen=True, slots=True)
class Sharded:
    """True for each of weights, gradients and optimizer state that a strategy shards over data-parallel ranks."""

    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    #: a rank holds its shard of the weights a second time, beside the optimizer's state
    copies: bool = False
    #: weights of matrix products are stored in half precision in the modes of ``_HALVED``
    halves: bool = False
    #: held on the CPU
    offload: bool = False
    within_node: bool = False


_ALL = Sharded(weights=True, gradients=True, optimizer=True)
_OFFLOADED = replace(_ALL, offload=True)
# DeepSpeed shards gradients under stage 1 too: it reduces them in buckets and keeps the rank's shard (measured).
_ZERO = Sharded(gradients=True, optimizer=True, copies=True)
STRATEGIES = {
    "auto": Sharded(),
    "ddp": Sharded(),
    "pipeline": Sharded(),
    "fsdp2": _ALL,
    "fsdp": _ALL,
    "fsdp1": _ALL,
    "hsdp": replace(_ALL, within_node=True),
    "deepspeed_zero1": _ZERO,
    "deepspeed_zero2": _ZERO,
    "deepspeed_zero1_half": replace(_ZERO, halves=True),
    "deepspeed_zero2_half": replace(_ZERO, halves=True),
    "deepspeed_zero3": replace(_ALL, copies=True),
    "fsdp2_offload": _OFFLOADED,
    "fsdp1_offload": _OFFLOADED,
    "deepspeed_zero3_offload": _OFFLOADED,
}


#: the parts of a peak
PARTS: tuple[str, ...] = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "other")


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """The peak memory of one rank, in bytes, and its parts at that moment.

    ``parts`` has a number for each of ``PARTS``; they add up to ``peak_bytes``. Gathered weights, half copies of
    weights, buckets and temporaries of the backward pass are "other". ``held`` has the bytes that stay between steps.
    ``method`` is ``"traced"`` or ``"formula"``; ``notes`` give the reason for a formula.
    """

    peak_bytes: int
    parts: dict[str, int]
    held: dict[str, int]
    method: str
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """Return a markdown table with a line for each part, and the peak."""
        lines = ["| part | size | share |", "| --- | --- | --- |"]
        for name, size in (*self.parts.items(), ("peak", self.peak_bytes)):
            lines.append(f"| {name} | {in_bytes(size)} | {size / max(self.peak_bytes, 1):.1%} |")
        said = "".join(f"\n{note}." for note in (f"By: {self.method}", *self.notes))
        return "\n".join(lines) + f"\n{said}\n"


def name_of(strategy: Any) -> str:
    """Return the name of a strategy for ``make_strategy``; for a class of Lightning its class name."""
    kind = type(strategy).__name__.removeprefix("Plan").removesuffix("Strategy")
    name: str = strategy if isinstance(strategy, str) else getattr(strategy, "made_as", "") or kind
    return name.lower().removeprefix("mp_")


def compute_bytes(precision: str) -> int:
    """Return the bytes of an operand of a product; FP8 operands are cast from bf16."""
    return 4 if precision == "32-true" else 2


def held(precision: str, strategy: str, ranks: int) -> tuple[float, float, float]:
    """Return bytes a parameter on each of ``ranks`` data-parallel ranks: weights, gradients, AdamW's state.

    An unknown mode counts as fp32, an unknown strategy as one device. Offloaded bytes count as 0.
    """
    sharded = STRATEGIES.get(strategy, STRATEGIES["auto"])
    if sharded.offload:
        return 0.0, 0.0, 0.0
    weights, gradients, moments = HELD.get(precision, HELD["32-true"])
    moments += weights * sharded.copies
    if sharded.halves and precision in _HALVED:
        weights = compute_bytes(precision)
    over = [ranks if split else 1 for split in (sharded.weights, sharded.gradients, sharded.optimizer)]
    return weights / over[0], gradients / over[1], moments / over[2]


def memory(shape: ModelShape, layout: Layout) -> dict[str, float]:
    """Return the bytes on the fullest rank: ``parameters gradients optimizer_state activations other``."""
    sharded = STRATEGIES[layout.strategy]
    split = layout.tensor * layout.pipeline
    own = shape.params / split
    ranks = layout.data * layout.context
    if sharded.within_node:
        ranks = max(1, min(ranks, layout.gpus_per_node // layout.tensor))
    weights, gradients, moments = (own * each for each in held(layout.precision, layout.strategy, ranks))
    half = compute_bytes(layout.precision)
    if sharded.halves and layout.precision in _HALVED:  # all but the embedding
        weights += (HELD[layout.precision][0] - half) * shape.vocab * shape.hidden / split
    tokens = layout.micro_batch * shape.seq_len / (layout.context * layout.tensor)
    # The numbers that a block keeps for the backward pass of a token, with fused attention. A gated MLP has three
    # matrices.
    kept = 6 * shape.hidden + 2 * shape.hidden * shape.kv_heads / shape.heads
    block = half * (kept + (4 if shape.gated else 2) * shape.intermediate)
    # The first stage of 1F1B holds as many micro-batches as there are stages, of a stage's layers each.
    layers = shape.layers / layout.pipeline * min(layout.pipeline, layout.accumulate)
    per_layer, working = {
        "none": (block, 0.0),
        "selective": (block * _SELECTIVE, block),
        "full": (shape.hidden * half, block),
    }[layout.checkpointing]
    if layout.tensor > 1:  # a block's input and its gradient are gathered along the sequence
        working += 2 * shape.hidden * half * layout.tensor
    # The loss and the recomputation of a block come one after the other.
    activations = tokens * (layers * per_layer + max(working, shape.vocab * _LOGIT))
    return {
        "parameters": weights,
        "gradients": gradients,
        "optimizer_state": moments,
        "activations": activations,
        "other": _transient(shape, layout, sharded, own),
    }


def _transient(shape: ModelShape, layout: Layout, sharded: Sharded, own: float) -> float:
    """Return bytes of gathered weights, unreduced gradients, DDP's buckets and autocast's half copies."""
    half = compute_bytes(layout.precision)
    if not sharded.weights:
        halved = sharded.halves and layout.precision in _HALVED
        copies = half if layout.precision.endswith("-mixed") and layout.checkpointing == "none" and not halved else 0
        gradient = HELD[layout.precision][1]
        # half gradients are summed in fp32, in copies that stay until the next backward pass
        buckets = (gradient + (4 if gradient < 4 else 0)) if layout.data > 1 else 0
        return own * (copies + buckets)
    block = (shape.params - 2 * shape.vocab * shape.hidden) / shape.layers / layout.tensor
    ends = 2 * shape.vocab * shape.hidden / layout.tensor
    if layout.pipeline > 1:  # a stage is gathered, and its gradients stay whole, for all its micro-batches
        return own * (half + HELD[layout.precision][1])
    return half * (_GATHERED_UNITS * block + ends) + HELD[layout.precision][1] * max(block, ends / 2)
