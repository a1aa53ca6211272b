"""What the doctor says of this GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_mp.monitor.doctor import doctor
from lightning_mp.numerics.device import describe

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_this_gpus_facts_decide() -> None:
    facts = describe(torch.device("cuda"))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    names = {finding.name for finding in doctor(model, "bf16-mixed")}
    assert ("bf16_emulated" in names) == (facts.bf16 != "native")
    off = facts.tf32 and torch.get_float32_matmul_precision() == "highest"
    assert ("tf32_off" in {finding.name for finding in doctor(model, "32-true")}) == off
