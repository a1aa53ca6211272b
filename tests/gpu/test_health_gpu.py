"""The monitors on CUDA: the numbers of a plain loop, MFU and memory, and no waiting at any step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import AdamW

from lightning_mp.callbacks import LossScaleMonitor, PrecisionAudit, TrainingHealth
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
BAD = ("nonfinite_loss", "nonfinite_grad")
hosts = pytest.mark.parametrize("host", ["stock", "plan"])


def host_of(host: str, mode: str) -> dict[str, Any]:
    return stock_for(mode, "cuda") if host == "stock" else {"plugins": [plan_for(mode)]}


class NothingWaits(Callback):
    """Makes every synchronising operation of a batch an error, those of the monitors too; the first ones warm up.

    It comes first, so that its end of a batch is the next batch's start.
    """

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if batch_idx > 1 else "default")

    def on_train_end(self, *_: Any) -> None:
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


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("host", "mode"), [("plan", "32-true"), ("plan", "16-mixed"), ("stock", "32-true"), ("stock", "bf16-mixed")]
)
def test_every_step_is_measured_and_nothing_waits(host: str, mode: str, every: int, tmp_path: Path) -> None:
    health, scale = TrainingHealth(tmp_path, every, report=False), LossScaleMonitor(every)
    monitors = [NothingWaits(), health, scale, PrecisionAudit(run_dir=tmp_path)]
    try:
        cuda_fit(Unread(FUSED), callbacks=monitors, **host_of(host, mode))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = list(range(0, 8, every))
    assert [row[metric_names.STEP] for row in health.rows] == expected
    assert [row[metric_names.STEP] for row in scale.rows] == (expected if mode == "16-mixed" else [])
    assert all(row[metric_names.GRAD_NORM] > 0 for row in health.rows)


def test_a_wait_is_seen() -> None:
    """The judge of the test above: a module that asks for its loss."""

    class Asks(Unread):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            cuda_fit(Asks(FUSED), callbacks=[NothingWaits()])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("host", "action", "module"), [("plan", "log", "net.3"), ("stock", "skip", "net.3"), ("stock", "log", None)]
)
def test_a_bad_step_is_told_whenever_its_numbers_arrive(host: str, action: str, module: Any, tmp_path: Path) -> None:
    """Where it was not applied, or is left out for the action, with the module in which it began."""
    mine = TrainingHealth(tmp_path, actions=dict.fromkeys(BAD, action), report=False)
    cuda_fit(Unread(FUSED, overflow_at=(4,)), callbacks=[mine], **host_of(host, "32-true"))
    event = next(event for event in mine.events if event.is_alert)
    assert (event.step, event.action) == (4, action)
    assert event.kind in BAD
    assert module is None or event.module == module
    assert [row[metric_names.STEP] for row in mine.rows] == list(range(8))


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
