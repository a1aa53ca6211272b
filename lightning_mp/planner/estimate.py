"""``estimate``: speed, memory, days and cost of one layout.

The speed is a roofline of compute and traffic, times a utilisation that was fitted to published runs. Compute and the
traffic of data parallelism overlap, so the larger one counts. The traffic of tensor parallelism is added. The sum is
divided by the share of time that the pipeline's bubble leaves.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lightning_mp.errors import Faults, PlanError, is_number
from lightning_mp.planner.memory import STRATEGIES, TENSOR_HEADROOM, USABLE, compute_bytes, held, memory
from lightning_mp.planner.shape import CONVENTIONS, Layout, ModelShape, checked, flops_per_token

_GIB = 2**30
_DAY = 86400.0
#: High over low. Leaving each model out in turn, as much as this covers is in docs/reference/planner.md; tests hold it.
SPREAD = 2.0
#: the same for GPUs and modes without a published run, and for offload
UNMEASURED_SPREAD = 2.5
#: Time with recomputation over that without: a forward, of three, comes again; what selective checkpointing repeats is
#: no product, a few per cent (Korthikanti et al. 2022, table 4).
RECOMPUTED = {"none": 1.0, "selective": 1.03, "full": 4 / 3}
#: bytes/s of Adam on a CPU, for one GPU's share of a node's memory bandwidth (an assumption)
_CPU_ADAM = 25e9
_OFFLOADED_BYTES = 28  # weight, gradient and two moments read, all but the gradient written: 4 bytes each
#: Coefficients of the log of utilisation by ``features``: least squares over 252 published bf16 and fp8 runs, with a
#: penalty of 2 on the squares of all but the first (tests/planner/test_published.py fits them again).
UTILISATION = (-0.43377532480909686, -0.33362781049663176, -0.1568999416238148, 0.21654954772904225)
#: on which GPUs and in which modes those ran; the H200 stands beside its fp8 runs
_PUBLISHED = {
    *((word, "bf16-mixed") for word in ("a100-40", "a100-80", "h100-80", "h200-141")),
    *((word, "fp8-mixed") for word in ("h100-80", "h200-141")),
    ("a100-80", "16-mixed"),
}


class Range(NamedTuple):
    """Tokens a second on each GPU."""

    low: float
    mid: float
    high: float


#: fields of the layout that an estimate has too
_OF_A_LAYOUT = ("precision", "strategy", "data", "tensor", "pipeline", "checkpointing", "micro_batch", "accumulate")
_FIGURES = ("memory_bytes", "reason", "mfu", "convention", "parts")


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected speed and memory of a run. The fields of its layout are attributes too.

    ``tokens_per_s`` is for each GPU. ``parts`` are bytes on the fullest rank. ``mfu`` is for the middle of the range.
    """

    shape: ModelShape
    layout: Layout
    tokens_per_s: Range
    parts: dict[str, float]
    #: True if runs on this GPU in this mode were published
    measured: bool
    #: why ``advise`` chose it
    reason: str = ""
    convention: ClassVar[str] = "mosaicml"

    def __getattr__(self, name: str) -> Any:
        if name not in _OF_A_LAYOUT:
            raise AttributeError(name)
        return getattr(self.layout, name)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain = {name: getattr(self, name) for name in (*_OF_A_LAYOUT, *_FIGURES)}
        return {**plain, "tokens_per_s": self.tokens_per_s._asdict()}

    @property
    def memory_bytes(self) -> int:
        """Return the bytes on the fullest rank."""
        return round(sum(self.parts.values()))

    @property
    def missing_bytes(self) -> int:
        """Return the bytes that are missing on each GPU, a margin for errors of the formula included; 0 if it fits."""
        usable = 1 - TENSOR_HEADROOM if self.layout.tensor > 1 else USABLE
        return max(0, self.memory_bytes - round(self.layout.gpu.memory * usable))

    @property
    def fits(self) -> bool:
        """True if it fits the GPU's memory."""
        return self.missing_bytes == 0

    @property
    def mfu(self) -> float:
        """Return FLOPs a second by ``convention`` over the peak of the mode's dtype, from 0 to 1."""
        peak = self.layout.gpu.peak(self.layout.precision)
        assert peak is not None
        return flops_per_token(self.shape, self.convention) * self.tokens_per_s.mid / peak

    def days(self, tokens: float | None = None) -> tuple[float, float, float]:
        """Return days for that number of tokens, or Chinchilla's: at the high, middle and low speed of the range."""
        low, mid, high = (
            (tokens or self.shape.tokens) / (each * self.layout.gpus) / _DAY for each in self.tokens_per_s
        )
        return high, mid, low

    def cost(self, price: float, tokens: float | None = None) -> tuple[float, float, float]:
        """Return the cost of :meth:`days`, at ``price`` an hour of one GPU.

        Raises:
            PlanError: a price that is no finite number of at least 0.
        """
        if not is_number(price) or price < 0:
            raise PlanError.of(f"price={price!r} is no price of a GPU for an hour", "write 2.5", "estimate")
        low, mid, high = (24 * price * self.layout.gpus * days for days in self.days(tokens))
        return low, mid, high

    def __str__(self) -> str:
        low, mid, high = self.tokens_per_s
        by = f"{self.convention}: {CONVENTIONS[self.convention]}"
        known = "" if self.measured else "; no published run on this GPU in this mode"
        speed = f"{mid:,.0f} tokens/s a GPU ({low:,.0f} to {high:,.0f}{known}), MFU {self.mfu:.1%} ({by})"
        return f"{speed}, {self.memory_bytes / _GIB:.1f} GiB of {self.layout.gpu.memory / _GIB:.1f}"


def estimate(  # noqa: PLR0913  what there is to say of a layout, by name
    shape: ModelShape,
    *,
    gpu: str,
    gpus: int,
    strategy: str = "fsdp2",
    precision: str = "bf16-mixed",
    micro_batch: int = 1,
    data: int | None = None,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
    checkpointing: str = "none",
    accumulate: int | None = None,
    nvlink: str = "full",
    interconnect_gbps: float | None = None,
    gpus_per_node: int = 8,
) -> Estimate:
    """Return the speed and memory of ``shape`` on ``gpus`` GPUs.

    ``micro_batch`` counts sequences for each data-parallel rank. ``accumulate`` counts micro-batches an optimizer step;
    by default one, with a pipeline four a stage. ``interconnect_gbps`` is in Gbit/s of a whole node. ``data`` is by
    default the number of GPUs divided by the other degrees.

    Raises:
        PlanError: an unknown word, degrees that do not fill the GPUs, a mode that the GPU cannot do; all at once.
    """
    words = {name: value for name, value in locals().items() if name != "shape"}
    faults = Faults("estimate")
    return of_layout(shape, faults.unwrap(checked(shape, faults, STRATEGIES, **words)))


def of_layout(shape: ModelShape, layout: Layout) -> Estimate:
    """The same of a layout that is known to be right."""
    measured = is_measured(layout) and shape.active == shape.params  # no run of a mixture is in the fit
    speed = spread(predicted(shape, layout), SPREAD if measured else UNMEASURED_SPREAD)
    return Estimate(shape, layout, speed, memory(shape, layout), measured)


def roofline(shape: ModelShape, layout: Layout) -> float:
    """Seconds a token on each GPU if every unit ran at its peak; units of the data sheets."""
    seconds = max(_compute(shape, layout), data_traffic(shape, layout)) + _tensor_traffic(shape, layout)
    return (seconds + _offload(shape, layout)) / (1 - bubble(layout.pipeline, layout.accumulate))


def bubble(pipeline: int, microbatches: int) -> float:
    """The part of a step in which a stage waits: (p - 1) / (m + p - 1) under 1F1B and GPipe (Narayanan et al. 2021)."""
    return (pipeline - 1) / (microbatches + pipeline - 1)


def _compute(shape: ModelShape, layout: Layout) -> float:
    """Seconds a token of products; under fp8 attention stays in bf16."""
    total, products = flops_per_token(shape), 6.0 * shape.active
    attention_mode = "bf16-mixed" if layout.precision == "fp8-mixed" else layout.precision
    slow, fast = (layout.gpu.peak(mode) for mode in (attention_mode, layout.precision))
    assert slow is not None
    assert fast is not None
    once = products / fast + (total - products) / slow
    return once * RECOMPUTED[layout.checkpointing]


def data_bytes(layout: Layout) -> tuple[float, float]:
    """Bytes a parameter that a rank sends for data parallelism: each micro-batch, and each optimizer step."""
    weight, reduced = compute_bytes(layout.precision), 4  # gradients are reduced in fp32 in every mode
    sharded = STRATEGIES[layout.strategy]
    if sharded.weights:
        return 2 * weight + reduced, 0.0  # gathered for the forward and for the backward pass; reduce-scattered
    if sharded.optimizer:
        updated, _, _ = held(layout.precision, layout.strategy, 1)
        return 0.0, reduced + updated  # reduce-scattered; gathered
    return 0.0, 2 * reduced  # an all-reduce is a reduce-scatter and an all-gather


def data_traffic(shape: ModelShape, layout: Layout) -> float:
    """Seconds a token that the links of data parallelism are busy."""
    ranks = layout.data * layout.context
    if ranks == 1:
        return 0.0
    each, once = data_bytes(layout)
    bytes_each = each + once / layout.accumulate
    own = shape.params / (layout.tensor * layout.pipeline)
    tokens = layout.micro_batch * shape.seq_len / (layout.context * layout.tensor * layout.pipeline)
    if STRATEGIES[layout.strategy].within_node and layout.nodes > 1:
        across = 8 / layout.accumulate / layout.gpus_per_node / layout.data_link()
        return own * (bytes_each / layout.link(layout.gpus_per_node) + across) / tokens
    return own * bytes_each * (ranks - 1) / ranks / layout.data_link() / tokens


def _tensor_traffic(shape: ModelShape, layout: Layout) -> float:
    """Seconds a token of tensor parallelism: 4 all-reduces of the activations a layer, forward and backward."""
    if layout.tensor == 1:
        return 0.0
    repeats = 6 if layout.checkpointing == "full" else 4  # those of the forward pass run again
    part = 2 * (layout.tensor - 1) / layout.tensor  # a rank sends its part twice
    sent = repeats * part * shape.hidden * compute_bytes(layout.precision) * shape.layers
    return sent * layout.tensor / layout.link(layout.tensor)


def _offload(shape: ModelShape, layout: Layout) -> float:
    """Return the seconds a token that offloading takes, 0 for a strategy without it.

    Each micro-batch copies gradients to the CPU and weights back. Each step updates on the CPU.
    """
    if not STRATEGIES[layout.strategy].offload:
        return 0.0
    own = shape.params / layout.data
    tokens = layout.micro_batch * shape.seq_len
    return own * (8 / layout.gpu.pcie + _OFFLOADED_BYTES / _CPU_ADAM / layout.accumulate) / tokens


def predicted(shape: ModelShape, layout: Layout, coefficients: tuple[float, ...] = UTILISATION) -> float:
    """The middle of the range: tokens a second on each GPU."""
    utilisation = math.exp(sum(map(float.__mul__, coefficients, features(shape, layout))))
    return utilisation / roofline(shape, layout)


def features(shape: ModelShape, layout: Layout) -> tuple[float, ...]:
    """What utilisation goes by: Hopper and newer (their peak outgrew their memory), fp8, narrow layers."""
    newer = (layout.gpu.device.capability or (0, 0)) >= (9, 0)
    narrow = math.log(min(shape.hidden, 8192) / 4096)
    return 1.0, float(newer), float(layout.precision == "fp8-mixed"), narrow


def is_measured(layout: Layout) -> bool:
    """Whether runs were published on this GPU in this mode, weights on it."""
    return (layout.gpu.word, layout.precision) in _PUBLISHED and not STRATEGIES[layout.strategy].offload


def spread(mid: float, high_over_low: float) -> Range:
    """A range about ``mid``, the same factor to both sides."""
    half = math.sqrt(high_over_low)
    return Range(mid / half, mid, mid * half)
