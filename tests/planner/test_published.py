"""The planner against 263 published runs: conventions of FLOPs, ranges with each model left out, memory."""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from lightning_mp.planner import ModelShape, flops_per_token
from lightning_mp.planner.estimate import (
    SPREAD,
    UTILISATION,
    features,
    is_measured,
    of_layout,
    predicted,
    roofline,
    spread,
)
from lightning_mp.planner.shape import Layout, default_gbps
from lightning_mp.policy.hardware import GPUS

#: what the table does not say of Llama 3.1: key-value heads, MLP
_LLAMA = {"llama3.1-8b": (8, 14336), "llama3.1-70b": (8, 28672), "llama3.1-405b": (8, 53248)}
GIB = 2**30


@dataclass(frozen=True)
class Run:
    """``reported`` is the source's own figure: an MFU in per cent (``mosaicml``), else TFLOP/s a GPU."""

    model: str
    shape: ModelShape
    layout: Layout
    tokens_per_s: float
    memory_gib: float | None
    convention: str
    reported: float | None


def _run(row: dict[str, str]) -> Run:
    gpus, tensor, pipeline, context = (int(row[name]) for name in ("gpus", "tensor", "pipeline", "context"))
    hidden, gpu = int(row["hidden"]), GPUS[row["gpu"]]
    kv_heads, wide = _LLAMA.get(row["model"], (0, 4 * hidden))
    sizes = int(row["params"]), int(row["layers"]), hidden, 0, kv_heads, wide, int(row["vocab"]), int(row["seq_len"])
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
    return Run(row["model"], ModelShape(*sizes), layout, speed, memory, row["convention"], reported)


ROWS = list(csv.DictReader(Path(__file__).with_name("published_runs.csv").read_text(encoding="utf-8").splitlines()))
RUNS = [_run(row) for row in ROWS]
HALF = [run for run in RUNS if run.layout.precision != "16-mixed"]


def fit(runs: Sequence[Run]) -> tuple[float, ...]:
    """Coefficients of the log of utilisation, by least squares with a small penalty on all but the first."""
    x = np.array([features(run.shape, run.layout) for run in runs])
    y = np.log([run.tokens_per_s * roofline(run.shape, run.layout) for run in runs])
    return tuple(np.linalg.solve(x.T @ x + np.diag([0.0, 2.0, 2.0, 2.0]), x.T @ y).tolist())


def test_the_planners_coefficients_are_those_of_the_published_runs() -> None:
    assert len(RUNS) == 263
    assert all("@" in row["source"] for row in ROWS)
    assert fit(HALF) == pytest.approx(UTILISATION, rel=1e-9)
    assert all(is_measured(run.layout) for run in RUNS)


@pytest.mark.parametrize(
    ("convention", "count", "within"), [("mosaicml", 216, 5e-3), ("megatron", 3, 2e-3), ("recompute", 11, 3e-3)]
)
def test_a_convention_gives_its_sources_own_figure(convention: str, count: int, within: float) -> None:
    runs = [run for run in RUNS if run.convention == convention]
    assert len(runs) == count
    for run in runs:
        flops = flops_per_token(run.shape, convention) * run.tokens_per_s
        peak = run.layout.gpu.peak(run.layout.precision)
        assert peak is not None
        # MosaicML prints an MFU, the others TFLOP/s a GPU.
        figure = 100 * flops / peak if convention == "mosaicml" else flops / 1e12
        assert figure == pytest.approx(run.reported, rel=within), (run.model, run.shape.seq_len)


def test_leaving_each_model_out_the_range_holds_what_was_measured() -> None:
    found: list[tuple[Run, float]] = []
    for model in dict.fromkeys(run.model for run in HALF):
        fitted = fit([run for run in HALF if run.model != model])
        found += [(run, predicted(run.shape, run.layout, fitted)) for run in HALF if run.model == model]
    assert (len(found), SPREAD) == (252, 2.0)
    inside = [spread(mid, SPREAD).low <= run.tokens_per_s <= spread(mid, SPREAD).high for run, mid in found]
    assert sum(inside) / len(inside) == pytest.approx(0.984, abs=0.0005)
    errors = [math.expm1(abs(math.log(run.tokens_per_s / mid))) for run, mid in found]
    assert median(errors) == pytest.approx(0.072, abs=0.0005)
    assert max(errors) == pytest.approx(0.61, abs=0.005)


def test_memory_is_near_what_was_measured() -> None:
    known = [(run, run.memory_gib) for run in RUNS if run.memory_gib is not None]
    errors = [of_layout(run.shape, run.layout).memory_bytes / GIB / gib - 1 for run, gib in known]
    assert len(errors) == 20
    assert median(map(abs, errors)) == pytest.approx(0.11, abs=0.005)
    assert (min(errors), max(errors)) == pytest.approx((-0.32, 0.52), abs=0.005)


def test_every_gpu_has_a_peak_in_what_it_computes() -> None:
    for gpu in GPUS.values():
        for precision in ("32-true", "16-mixed", *(["bf16-mixed"] if gpu.device.tf32 else [])):
            assert gpu.peak(precision) is not None, (gpu.word, precision)
        assert (gpu.peak("fp8-mixed") is not None) == gpu.device.fp8
        assert gpu.pcie < gpu.bandwidth
        assert gpu.nvlink < gpu.bandwidth
