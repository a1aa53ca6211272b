"""What :func:`lightning_mp.planner.predict_memory` answers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

#: what a peak is made of
PARTS: tuple[str, ...] = ("parameters", "gradients", "optimizer_state", "activations", "buffers", "other")
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryPrediction:
    """The most memory that one rank is given at once, in bytes, and what is alive at that moment.

    ``parts`` has a number for each of ``PARTS``, which add up to ``peak_bytes``: gathered weights, half copies of
    weights, buckets and what the backward pass works with are "other". ``held`` is what stays from step to step.
    ``method`` is ``"traced"``, ``"traced, and a formula"`` or ``"formula"``; ``notes`` say why it is not the first.
    """

    peak_bytes: int
    parts: dict[str, int]
    held: dict[str, int]
    method: str
    notes: tuple[str, ...] = ()

    def to_markdown(self) -> str:
        """A table: a line a part, and the peak."""
        lines = ["| part | MiB | share |", "| --- | --- | --- |"]
        for name, size in (*self.parts.items(), ("peak", self.peak_bytes)):
            lines.append(f"| {name} | {size / _MIB:,.1f} | {size / max(self.peak_bytes, 1):.1%} |")
        said = "".join(f"\n{note}." for note in (f"By: {self.method}", *self.notes))
        return "\n".join(lines) + f"\n{said}\n"
