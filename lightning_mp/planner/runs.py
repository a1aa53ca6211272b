"""The measured runs that the planner is fitted to and held against: ``published_runs.csv``, each with its source."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from lightning_mp.planner.layout import Layout, default_gbps
from lightning_mp.planner.shape import ModelShape
from lightning_mp.policy.hardware import GPUS

#: what the table does not say of Llama 3.1: key-value heads, MLP
_LLAMA = {"llama3.1-8b": (8, 14336), "llama3.1-70b": (8, 28672), "llama3.1-405b": (8, 53248)}


@dataclass(frozen=True, slots=True)
class Run:
    """A published run: ``tokens_per_s`` a GPU, ``memory_gib`` a GPU or ``None``.

    ``reported`` is the source's own figure under ``convention``: an MFU in per cent (``mosaicml``), else TFLOP/s a GPU.
    """

    source: str
    model: str
    shape: ModelShape
    layout: Layout
    tokens_per_s: float
    memory_gib: float | None
    convention: str
    reported: float | None


@cache
def published() -> tuple[Run, ...]:
    """All of them."""
    text = files("lightning_mp.planner").joinpath("published_runs.csv").read_text(encoding="utf-8")
    return tuple(map(_run, csv.DictReader(text.splitlines())))


def _run(row: dict[str, str]) -> Run:
    gpus, tensor, pipeline, context = (int(row[name]) for name in ("gpus", "tensor", "pipeline", "context"))
    hidden, gpu = int(row["hidden"]), GPUS[row["gpu"]]
    kv_heads, wide = _LLAMA.get(row["model"], (0, 4 * hidden))
    shape = ModelShape(
        int(row["params"]), int(row["layers"]), hidden, 0, kv_heads, wide, int(row["vocab"]), int(row["seq_len"])
    )
    # Megatron's runs replicate the weights, and reduce gradients once a step; the others shard all with FSDP.
    replicated = row["source"].startswith("NVIDIA")
    layout = Layout(
        gpu,
        gpus,
        "deepspeed_zero1" if replicated else "fsdp2",
        row["precision"],
        micro_batch=int(row["micro_batch"] or 1),
        data=max(1, gpus // (tensor * pipeline * context)),
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        checkpointing=row["checkpointing"],
        accumulate=int(row["accumulate"] or (4 * pipeline if replicated else 1)),
        interconnect_gbps=default_gbps(gpu),
    )
    memory, reported = (float(row[name]) if row[name] else None for name in ("memory_gib", "reported"))
    speed = float(row["tokens_per_s"])
    return Run(row["source"], row["model"], shape, layout, speed, memory, row["convention"], reported)
