"""How a run is laid out over GPUs: the degrees, the strategy, the links, and whether they go together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lightning_mp.errors import Faults, is_number
from lightning_mp.planner.shape import ModelShape
from lightning_mp.policy import precision_word
from lightning_mp.policy.hardware import GPU, find
from lightning_mp.policy.words import precision_fix

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "fp8-mixed", "bf16-true", "16-true")
CHECKPOINTING = ("none", "selective", "full")
NVLINK = ("full", "pairs", "none")
#: Gbit/s between nodes where none is said: what nodes of a generation are sold with (DGX, and the clouds' equivalents)
_GBPS = {"a100": 1600.0, "h100": 3200.0, "h200": 3200.0, "b200": 3200.0, "gb200": 3200.0, "gh200": 400.0}
_ETHERNET = 100.0
_COUNTS = {"gpus", "tensor", "pipeline", "context", "micro_batch", "gpus_per_node", "data", "accumulate"}


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to run: ``data * tensor * pipeline * context`` GPUs; ``accumulate`` micro-batches an optimizer step."""

    gpu: GPU
    gpus: int
    strategy: str
    precision: str
    micro_batch: int = 1
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    checkpointing: str = "none"
    accumulate: int = 1
    nvlink: str = "full"
    interconnect_gbps: float = _ETHERNET
    gpus_per_node: int = 8

    @property
    def nodes(self) -> int:
        """Nodes it takes."""
        return -(-self.gpus // self.gpus_per_node)

    def link(self, ranks: int) -> float:
        """Bytes/s in one direction between ``ranks`` neighbouring GPUs of a node."""
        wired = self.nvlink == "full" or (self.nvlink == "pairs" and ranks <= 2)
        return (wired and self.gpu.nvlink) or self.gpu.pcie

    def data_link(self) -> float:
        """Bytes/s at which a rank takes part in a collective over all data-parallel ranks.

        Between nodes the ranks of a node share its cards, and a ring passes each byte through a node once, so that a
        rank sees the whole node's bandwidth.
        """
        inside = self.link(min(self.gpus, self.gpus_per_node))
        return inside if self.nodes == 1 else min(inside, self.interconnect_gbps * 1e9 / 8)


def default_gbps(gpu: GPU) -> float:
    """Gbit/s between nodes, where it is not said."""
    return _GBPS.get(gpu.word.partition("-")[0], _ETHERNET)


def checked(
    shape: ModelShape,
    faults: Faults,
    strategies: Iterable[str],
    *,
    gpu: str,
    precision: str,
    strategy: str = "fsdp2",
    interconnect_gbps: float | None = None,
    **words: Any,
) -> Layout | None:
    """The layout that these words describe; all that is wrong with them goes into ``faults``, and there is none.

    ``words`` are further fields of :class:`Layout`; ``data`` and ``accumulate`` may be ``None``, and follow then.
    """
    found, mode = find(gpu, faults), precision_word(precision)
    if mode not in PRECISIONS:
        faults.add(f"unknown precision {precision!r}", ", ".join(PRECISIONS), precision_fix(precision))
    elif found is not None and found.peak(mode) is None:
        nearest = "bf16-mixed" if found.peak("bf16-mixed") else "16-mixed"
        faults.add(f"{found.word} has no units for precision={mode!r}", f"use {nearest!r}")
    strategy = str(strategy).removeprefix("mp_")
    if strategy not in strategies:
        faults.unknown("strategy", strategy, strategies, "write one of these")
    faults.one_of("checkpointing", words.get("checkpointing", "none"), CHECKPOINTING, "write 'none' to keep all")
    faults.one_of("nvlink", words.get("nvlink", "full"), NVLINK, "write 'none' for GPUs on PCIe")
    said = {name: value for name, value in words.items() if value is not None}
    for name in said.keys() & _COUNTS:
        faults.whole(name, said[name], 1, "write a positive whole number")
    if interconnect_gbps is not None and not (is_number(interconnect_gbps) and interconnect_gbps > 0):
        faults.add(f"interconnect_gbps={interconnect_gbps!r}", "Gbit/s of a node, above 0", "write 400")
    if faults.found or found is None or mode is None:
        return None
    gbps = default_gbps(found) if interconnect_gbps is None else interconnect_gbps
    layout = Layout(found, strategy=strategy, precision=mode, interconnect_gbps=gbps, **said)
    data = said.get("data", layout.gpus // (layout.tensor * layout.pipeline * layout.context))
    accumulate = said.get("accumulate", 4 * layout.pipeline if layout.pipeline > 1 else 1)
    layout = replace(layout, data=data, accumulate=accumulate)
    _check_degrees(layout, shape, faults)
    return layout


def _check_degrees(layout: Layout, shape: ModelShape, faults: Faults) -> None:
    degrees = {name: getattr(layout, name) for name in ("data", "tensor", "pipeline", "context")}
    product = math.prod(degrees.values())
    if product != layout.gpus:
        said = " x ".join(f"{name}={degree}" for name, degree in degrees.items())
        faults.add(f"{said} on {layout.gpus} GPUs", "degrees whose product is the GPUs", f"use {product} GPUs")
    if layout.tensor > layout.gpus_per_node:
        faults.add(f"tensor={layout.tensor} goes beyond a node", "keep it within a node, and use pipeline for the rest")
    elif shape.heads % layout.tensor or shape.hidden % layout.tensor:
        faults.add(f"tensor={layout.tensor} for {shape.heads} heads", "use a divisor of the heads")
    if layout.pipeline > shape.layers:
        faults.add(f"pipeline={layout.pipeline} for {shape.layers} layers", "use fewer stages")
    if shape.seq_len % layout.context:
        faults.add(f"context={layout.context} for seq_len={shape.seq_len}", "use a divisor")
