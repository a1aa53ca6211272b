"""How a run is laid out over GPUs: the degrees, the strategy, the links, and whether they go together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from lightning_mp.errors import Faults, is_number, is_whole
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
_COUNTS = ("gpus", "tensor", "pipeline", "context", "micro_batch", "gpus_per_node", "data", "accumulate")
#: what follows from the rest
_NOT_SAID = {"data": 0, "accumulate": 0}


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


def checked_precision(gpu: GPU | None, precision: object, faults: Faults) -> str:
    """The mode by its name; a word that is none, or one that the GPU has no units for, is noted."""
    word = precision_word(precision)
    if word not in PRECISIONS:
        faults.add(f"unknown precision {precision!r}", ", ".join(PRECISIONS), precision_fix(precision))
        return "32-true"
    if gpu is not None and gpu.peak(word) is None:
        able = [mode for mode in PRECISIONS if gpu.peak(mode)]
        nearest = "bf16-mixed" if "bf16-mixed" in able else "16-mixed"
        faults.add(f"precision={word!r} on {gpu.word}", ", ".join(able), f"use {nearest!r}")
    return word


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

    ``words`` are further fields of :class:`Layout`; ``None`` leaves ``data`` and ``accumulate`` to follow.
    """
    found = find(gpu, faults)
    mode = checked_precision(found, precision, faults)
    strategy = str(strategy).removeprefix("mp_")
    if strategy not in strategies:
        faults.unknown("strategy", strategy, strategies, "write one of these")
    faults.one_of("checkpointing", words.get("checkpointing", "none"), CHECKPOINTING, "write 'none' to keep all")
    faults.one_of("nvlink", words.get("nvlink", "full"), NVLINK, "write 'none' for GPUs on PCIe")
    counts = {name: value for name, value in words.items() if name in _COUNTS and value is not None}
    wrong = [name for name, value in counts.items() if not is_whole(value) or value < 1]
    for name in wrong:
        faults.whole(name, counts[name], 1, "write a positive whole number")
    if interconnect_gbps is not None and not (is_number(interconnect_gbps) and interconnect_gbps > 0):
        given = f"interconnect_gbps={interconnect_gbps!r}"
        faults.add(given, "Gbit/s of a node, above 0", "write 400 for one card of that speed")
    if wrong or found is None:
        return None
    gbps = default_gbps(found) if interconnect_gbps is None else interconnect_gbps
    fields: dict[str, Any] = {**words, **_NOT_SAID, **counts}
    layout = Layout(found, strategy=strategy, precision=mode, interconnect_gbps=gbps, **fields)
    layout = _filled(layout, shape, faults)
    return None if faults.found else layout


def _filled(layout: Layout, shape: ModelShape, faults: Faults) -> Layout:
    """With the data-parallel degree and the micro-batches that were not said; what does not go together is noted."""
    gpus, tensor, pipeline, context = layout.gpus, layout.tensor, layout.pipeline, layout.context
    split = tensor * pipeline * context
    data = layout.data or gpus // split
    if data * split != gpus:
        product = f"data={data} x tensor={tensor} x pipeline={pipeline} x context={context} on {gpus} GPUs"
        faults.add(product, "degrees whose product is the number of GPUs", f"use {data * split} GPUs, or other degrees")
    if tensor > layout.gpus_per_node:
        allowed = f"tensor parallelism within a node, up to {layout.gpus_per_node}"
        faults.add(f"tensor={tensor}", allowed, f"use tensor={layout.gpus_per_node}, and pipeline for the rest")
    elif shape.heads % tensor or shape.hidden % tensor:
        faults.add(f"tensor={tensor} for {shape.heads} heads", "a divisor of the heads", "use a smaller one")
    if pipeline > shape.layers:
        faults.add(f"pipeline={pipeline} for {shape.layers} layers", "a stage has a layer at least", "use fewer stages")
    if shape.seq_len % context:
        faults.add(f"context={context}", f"a divisor of seq_len={shape.seq_len}", "use a power of two")
    return replace(layout, data=data, accumulate=layout.accumulate or (4 * pipeline if pipeline > 1 else 1))
