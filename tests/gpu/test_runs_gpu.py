"""Batch norms over two processes on CUDA, checkpointing's memory, a prediction of it, the command line."""

import gc
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory import Cell
from lightning_mp import Checkpointing, MixedPrecisionPlan, trainer_kwargs
from lightning_mp.callbacks import ActivationCheckpointing
from lightning_mp.compat.lightning import Trainer
from lightning_mp.numerics.peak_memory import PeakMemory
from lightning_mp.planner import predict_memory
from lightning_mp.planner.predict import ALONE
from support.cuda import Resident, cuda_fit
from support.models import Regression, same_weights, weights
from support.norms import direct
from support.ranks import Ranks
from support.training import QUICK, losses, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_torchs_kernels_normalize_by_the_whole_batch(ranks: Ranks) -> None:
    for found in ranks.call(direct, "cuda"):
        for whole, synchronized in found:
            torch.testing.assert_close(synchronized, whole)


WIDTH, BLOCKS = 512, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.back(nn.functional.gelu(self.wide(x))))


class Deep(Regression):
    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(p, lr=1e-4, fused=True))
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))


def _run(**options: Any) -> tuple[Deep, int]:
    module = Deep()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 16, generator=generator)
    torch.manual_seed(2)
    torch.cuda.reset_peak_memory_stats()
    cuda_fit(module, data=Resident([[x, x.sum(1, keepdim=True)]] * 3), **options)
    return module, torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("mechanism", ["plan", "selective plan", "callback"])
def test_the_same_numbers_in_less_memory(mode: str, mechanism: str) -> None:
    plain, usual = _run(plugins=[MixedPrecisionPlan(mode)])
    if mechanism == "callback":
        module, peak = _run(precision=mode, callbacks=[ActivationCheckpointing("Block")])
    else:
        rule: Any = "Block" if mechanism == "plan" else Checkpointing(modules="Block", mode="selective")
        module, peak = _run(plugins=[MixedPrecisionPlan(mode, checkpointing=rule)])
    assert module.losses == plain.losses
    assert same_weights(weights(module), weights(plain))
    assert peak < (0.7 if "selective" not in mechanism else 0.95) * usual


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_peak_is_cudas(precision: str, checkpointing: str) -> None:
    cell = Cell("llama", precision, checkpointing, "AdamW", rows=1024)  # beside GiB cuBLAS takes little
    found = predict_memory(cell.module(), cell.batch(), cell.plan())
    assert found.method == "traced", found.notes
    gc.collect()
    with PeakMemory("cuda") as peak:
        arguments = trainer_kwargs(cell.plan(), devices=1, accelerator="cuda", logger=False, **ALONE)
        Trainer(**arguments).fit(cell.module(), repeat(cell.batch()))
    assert found.peak_bytes == pytest.approx(peak.bytes, rel=0.05)


def test_trainer_gpu_trains_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra")
    monkeypatch.chdir(tmp_path)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run(*QUICK[1:], "trainer=gpu", "plan=a100", "trainer.max_steps=3", "run_dir=out")
    assert len(losses("out")) == 3
    assert torch.cuda.max_memory_allocated() > before
