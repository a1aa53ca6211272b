"""The monitors and the guard on CUDA: the numbers of a plain loop, and no waiting."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import AdamW

from lightning_mp.bad_steps.replay import Replayer
from lightning_mp.callbacks import LossScaleMonitor, PrecisionAudit, TrainingHealth
from lightning_mp.plan.diagnosis import Diagnosis
from lightning_mp.record import metric_names
from support import health
from support.cuda import NothingWaits, Unread, cuda_fit
from support.nonfinite import Breaks
from support.oracles import MODES, plan_for, stock_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ADAMW = partial(AdamW, lr=health.LR, eps=1e-4, fused=True)
NEAR = {"32-true": 1e-4, "bf16-mixed": 5e-2, "16-mixed": 1e-2, "bf16-true": 0.2, "16-true": 5e-2}


class Throughout(NothingWaits):
    """Between batches too, where the monitors read; it comes first, so that its end of a batch is theirs to begin."""

    def on_train_batch_end(self, *_: Any) -> None: ...

    def on_train_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")  # Lightning's teardown brings everything to the host


hosts = pytest.mark.parametrize("host", ["stock", "plan"])


def host_of(host: str, mode: str) -> dict[str, Any]:
    return stock_for(mode, "cuda") if host == "stock" else {"plugins": [plan_for(mode)]}


@pytest.mark.parametrize("mode", MODES)
@hosts
def test_the_numbers_are_those_of_a_plain_loop(host: str, mode: str, tmp_path: Path) -> None:
    mine = TrainingHealth(tmp_path, report=False)
    cuda_fit(Unread(ADAMW), callbacks=[mine], max_steps=1, **host_of(host, mode))
    (expected,) = health.oracle(world=1)[:1]
    assert {name: mine.rows[0][name] for name in expected} == pytest.approx(expected, rel=NEAR[mode])


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize(
    ("host", "mode"), [("plan", "32-true"), ("plan", "16-mixed"), ("stock", "32-true"), ("stock", "bf16-mixed")]
)
def test_every_step_is_measured_and_nothing_waits(host: str, mode: str, every: int, tmp_path: Path) -> None:
    health, scale = TrainingHealth(tmp_path, every, report=False), LossScaleMonitor(every)
    monitors = [Throughout(), health, scale, PrecisionAudit(run_dir=tmp_path)]
    cuda_fit(Unread(ADAMW), callbacks=monitors, **host_of(host, mode))
    expected = list(range(0, 8, every))
    assert [row[metric_names.STEP] for row in health.rows] == expected
    assert [row[metric_names.STEP] for row in scale.rows] == (expected if mode == "16-mixed" else [])
    assert all(row[metric_names.GRAD_NORM] > 0 for row in health.rows)


FUSED = partial(AdamW, lr=1e-2, eps=1e-4, weight_decay=0.3, fused=True)


class Asks(Callback):
    """Remembers under a ban on waiting, and has every batch replayed."""

    def __init__(self) -> None:
        self.replayer, self.diagnoses = Replayer(), list[Diagnosis]()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.replayer.remember(trainer, batch, batch_idx)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.diagnoses.append(self.replayer.locate(trainer))
        for parameter in pl_module.parameters():  # stock Lightning would apply it, and every later step were bad too
            if parameter.grad is not None:
                parameter.grad.zero_()


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
def test_what_rests_on_cudas_generator_comes_again(mode: str) -> None:
    class Draws(Breaks):
        def __init__(self) -> None:
            super().__init__("gradient", (), FUSED)
            self.broke: list[bool] = []

        def breaks_on(self, batch_idx: int) -> bool:
            self.broke.append(torch.rand((), device=self.device).item() < 0.5)
            return self.broke[-1]

    torch.manual_seed(5)
    module, asks = Draws(), Asks()
    cuda_fit(module, callbacks=[asks], **stock_for(mode, "cuda"))
    assert len(module.broke) == 8
    assert {True, False} == set(module.broke)
    assert [diagnosis.note is None and diagnosis.origin is not None for diagnosis in asks.diagnoses] == module.broke
