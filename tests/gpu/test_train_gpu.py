"""``lightning-mp train`` on every GPU of the machine, as ``trainer=gpu`` says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.training import QUICK, losses, run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one CUDA device")]


def test_trainer_gpu_trains_on_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("hydra")
    monkeypatch.chdir(tmp_path)
    before = torch.cuda.max_memory_allocated()
    run(*QUICK[1:], "trainer=gpu", "plan=a100", "trainer.max_steps=3", "run_dir=out")
    assert len(losses("out")) == 3
    assert torch.cuda.max_memory_allocated() > before
