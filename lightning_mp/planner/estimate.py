"""``estimate``: how fast, how much memory, how long and how dear, for one layout."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_mp.errors import Faults, is_number
from lightning_mp.planner.layout import Layout, checked
from lightning_mp.planner.memory import STRATEGIES, memory, usable
from lightning_mp.planner.shape import CONVENTIONS, ModelShape, flops_per_token
from lightning_mp.planner.speed import SPREAD, UNMEASURED_SPREAD, Range, is_measured, predicted, spread

_GIB = 2**30
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is expected of a run.

    ``tokens_per_s`` is for each GPU; ``parts`` are bytes on the fullest rank. ``mfu`` is of the middle of the range:
    FLOPs by ``convention`` over the peak of the mode's dtype.
    """

    shape: ModelShape
    layout: Layout
    tokens_per_s: Range
    parts: dict[str, float]
    convention: str
    #: whether runs on this GPU in this mode were published
    measured: bool

    @property
    def memory_bytes(self) -> int:
        """Bytes on the fullest rank."""
        return round(sum(self.parts.values()))

    @property
    def missing_bytes(self) -> int:
        """Bytes it lacks to fit, a margin for what a formula does not know included; 0 where it fits."""
        return max(0, self.memory_bytes - round(usable(self.layout)))

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory holds it."""
        return self.missing_bytes == 0

    @property
    def mfu(self) -> float:
        """FLOPs a second by ``convention`` over the peak, 0 to 1."""
        peak = self.layout.gpu.peak(self.layout.precision)
        assert peak is not None
        return flops_per_token(self.shape, self.convention) * self.tokens_per_s.mid / peak.flops_per_s

    def days(self, tokens: float | None = None) -> tuple[float, float, float]:
        """Days for so many tokens, or for Chinchilla's budget: at the high, the middle and the low end of the range."""
        low, mid, high = self.tokens_per_s
        seconds = [(tokens or self.shape.tokens) / (each * self.layout.gpus) for each in (high, mid, low)]
        return seconds[0] / _DAY, seconds[1] / _DAY, seconds[2] / _DAY

    def cost(self, price: float, tokens: float | None = None) -> tuple[float, float, float]:
        """The same in money, at ``price`` an hour of one GPU.

        Raises:
            PlanError: a price that is no finite number of at least 0.
        """
        with Faults("estimate") as faults:
            if not is_number(price) or price < 0:
                faults.add(f"price={price!r}", "what a GPU costs for an hour, 0 or more", "write 2.5")
        hourly = 24 * price * self.layout.gpus
        low, mid, high = self.days(tokens)
        return low * hourly, mid * hourly, high * hourly

    def __str__(self) -> str:
        low, mid, high = self.tokens_per_s
        by = f"{self.convention}: {CONVENTIONS[self.convention]}"
        known = "" if self.measured else "; no published run on this GPU in this mode"
        return (
            f"{mid:,.0f} tokens/s a GPU ({low:,.0f} to {high:,.0f}{known}), MFU {self.mfu:.1%} ({by}), "
            f"{self.memory_bytes / _GIB:.1f} GiB of {self.layout.gpu.memory / _GIB:.1f}"
        )


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
    convention: str = "mosaicml",
) -> Estimate:
    """Speed and memory of ``shape`` on ``gpus`` GPUs.

    ``micro_batch`` is in sequences for each data-parallel rank, ``accumulate`` in micro-batches an optimizer step (by
    default one; with a pipeline four a stage); ``interconnect_gbps`` in Gbit/s of a whole node. ``data`` is by default
    what the other degrees leave.

    Raises:
        PlanError: an unknown word, degrees that do not fill the GPUs, a mode that the GPU cannot do; all at once.
    """
    words = {name: value for name, value in locals().items() if name not in ("shape", "convention")}
    with Faults("estimate") as faults:
        if convention not in CONVENTIONS:
            faults.unknown("convention", convention, CONVENTIONS, "write one of these")
        layout = checked(shape, faults, STRATEGIES, **words)
    assert layout is not None
    return of_layout(shape, layout, convention)


def of_layout(shape: ModelShape, layout: Layout, convention: str = "mosaicml") -> Estimate:
    """The same of a layout that is known to be right."""
    measured = is_measured(layout)
    speed = spread(predicted(shape, layout), SPREAD if measured else UNMEASURED_SPREAD)
    return Estimate(shape, layout, speed, memory(shape, layout), convention, measured)
