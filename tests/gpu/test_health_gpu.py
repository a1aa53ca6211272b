"""The monitors on CUDA: the numbers of a plain loop, MFU and memory, and no waiting between readings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import AdamW

from lightning_mp.callbacks import LossScaleMonitor, TrainingHealth
from lightning_mp.monitor import metric_names
from lightning_mp.numerics.device import describe
from lightning_mp.policy import hardware
from support import health
from support.cuda import Resident, Unread, cuda_fit
from support.language import LENGTH, Language, gpt2, tokens
from support.oracles import MODES, plan_for, stock_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FUSED = partial(AdamW, lr=health.LR, eps=1e-4, fused=True)
NEAR = {"32-true": 1e-4, "bf16-mixed": 5e-2, "16-mixed": 1e-2, "bf16-true": 0.2, "16-true": 5e-2}
hosts = pytest.mark.parametrize("host", ["stock", "plan"])


def host_of(host: str, mode: str) -> dict[str, Any]:
    return stock_for(mode, "cuda") if host == "stock" else {"plugins": [plan_for(mode)]}


class NothingWaits(Callback):
    """Makes every synchronising operation of a batch without a reading an error; the first batches warm up."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 1 and batch_idx % self.every:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", MODES)
@hosts
def test_the_numbers_are_those_of_a_plain_loop(host: str, mode: str, tmp_path: Path) -> None:
    mine = TrainingHealth(tmp_path, groups=health.GROUPS, report=False)
    cuda_fit(Unread(FUSED), callbacks=[mine], max_steps=1, **host_of(host, mode))
    (expected,) = health.oracle(world=1)[:1]
    assert {name: mine.rows[0][name] for name in expected} == pytest.approx(expected, rel=NEAR[mode])


@pytest.mark.parametrize("every", [3, 100])
@pytest.mark.parametrize(("host", "mode"), [("plan", "32-true"), ("plan", "16-mixed"), ("stock", "bf16-mixed")])
def test_between_readings_nothing_waits(host: str, mode: str, every: int, tmp_path: Path) -> None:
    monitors = [TrainingHealth(tmp_path, every, report=False), LossScaleMonitor(every)]
    try:
        cuda_fit(Unread(FUSED), callbacks=[*monitors, NothingWaits(every)], **host_of(host, mode))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
def test_mfu_is_what_was_counted_over_the_data_sheets_peak(mode: str, tmp_path: Path) -> None:
    """The loss's fused kernels and the attention's differ from a CPU's; the products they stand for do not."""
    mine = TrainingHealth(tmp_path, report=False)
    cuda_fit(Language(gpt2()), data=Resident(tokens()), callbacks=[mine], plugins=[plan_for(mode)])
    dtype = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}[mode]
    known = hardware.peak(describe(torch.device("cuda")), dtype)
    for row in mine.rows:
        if known is None:
            assert row[metric_names.MFU] is None
        else:
            expected = 4_055_040 / (2 * LENGTH) * row[metric_names.TOKENS_PER_S] / known.flops_per_s
            assert row[metric_names.MFU] == pytest.approx(expected, rel=1e-3)
        assert 0 < row[metric_names.MEMORY_ALLOCATED] <= row[metric_names.MEMORY_PEAK]
        assert row[metric_names.MEMORY_ALLOCATED] <= row[metric_names.MEMORY_RESERVED]
