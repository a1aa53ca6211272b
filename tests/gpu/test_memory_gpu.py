"""On a GPU a prediction is held against what CUDA's allocator says."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.memory import Again, Cell
from lightning_mp import trainer_kwargs
from lightning_mp.compat.lightning import Trainer
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.planner import predict_memory
from lightning_mp.tracing.run import ALONE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_peak_is_cudas(precision: str, checkpointing: str) -> None:
    cell = Cell("llama", precision, checkpointing, "AdamW", rows=1024)  # beside GiB cuBLAS takes little
    found = predict_memory(cell.module(), cell.batch(), cell.plan())
    assert found.method == "traced", found.notes
    gc.collect()
    with PeakMemory("cuda") as peak:
        arguments = trainer_kwargs(cell.plan(), devices=1, accelerator="cuda", logger=False, **ALONE)
        Trainer(**arguments).fit(cell.module(), Again(cell.batch()))
    assert found.peak_bytes == pytest.approx(peak.bytes, rel=0.05)
