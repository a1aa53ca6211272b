"""EnableTF32 on a machine without TF32; what it does on one that has it is in tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mp import PlanError
from lightning_mp.callbacks import EnableTF32
from support.models import Regression
from support.running import fit
from support.traces import lightning_says


class Looks(Regression):
    """Reads the setting while training."""

    def on_train_start(self) -> None:
        self.met = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("setting", ["high", "medium", "highest"])
def test_on_a_cpu_it_changes_nothing_and_says_so(setting: str) -> None:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    module, plain = Looks(), Regression()
    with lightning_says() as lines:
        fit(module, callbacks=[EnableTF32(setting)])
    assert module.met == before
    assert [line for line in lines if "TF32" in line] == [
        f"EnableTF32({setting!r}) changes nothing on cpu: it has no TF32"
    ]
    fit(plain)
    assert module.losses == plain.losses


@pytest.mark.parametrize("setting", ["tf32", "higher", "", 3])
def test_an_unknown_setting_is_refused_when_written(setting: Any) -> None:
    with pytest.raises(PlanError, match="tf32="):
        EnableTF32(setting)


def test_the_default_turns_tf32_on() -> None:
    assert EnableTF32().setting == "high"
