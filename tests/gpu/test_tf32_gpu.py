"""Complaint 7 (PL 21256): TF32 is on while it is declared, never makes torch's own getter raise, and is given back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_mp import MixedPrecisionPlan
from lightning_mp.callbacks import EnableTF32
from support.cuda import cuda_fit
from support.models import Regression

_ampere = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _ampere, reason="needs a CUDA device with TF32")]

OWNERS: dict[str, Any] = {
    "plan": lambda setting: {"plugins": [MixedPrecisionPlan("32-true", tf32=setting)]},
    "callback": lambda setting: {"callbacks": [EnableTF32(setting)]},
}
each_owner = pytest.mark.parametrize("owner", OWNERS)


def _state() -> dict[str, Any]:
    """Both of torch's interfaces, where both are there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state: dict[str, Any] = {}
        for name, owner in (("matmul", torch.backends.cuda.matmul), ("cudnn", torch.backends.cudnn)):
            if hasattr(owner, "fp32_precision"):
                state[f"{name}.fp32_precision"] = owner.fp32_precision
        try:
            state["getter"] = torch.get_float32_matmul_precision()
        except RuntimeError:
            state["getter"] = "raises"
        return state


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


class Looks(Regression):
    """Multiplies two matrices while training, and compares with fp64."""

    def __init__(self, fail: bool = False) -> None:
        super().__init__()
        self.fail = fail

    def on_train_start(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        a, b = (torch.randn(512, 512, device=self.device, generator=generator) for _ in range(2))
        self.error = ((a @ b).double() - a.double() @ b.double()).abs().max().item()
        self.met = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        if self.fail:
            raise KeyError("planned")


@each_owner
@pytest.mark.parametrize(
    ("setting", "cudnn", "coarse"), [("high", True, True), ("medium", True, True), ("highest", False, False)]
)
def test_products_are_what_was_declared(owner: str, setting: str, cudnn: bool, coarse: bool) -> None:
    """TF32 keeps 10 bits of mantissa: its products of 512 terms are off by 1e-2, fp32's by 1e-4."""
    module = Looks()
    cuda_fit(module, **OWNERS[owner](setting))
    assert module.met == (setting, cudnn)
    assert (module.error > 2e-3) == coarse


@each_owner
@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("before", ["highest", "high"])
def test_what_was_there_is_back(owner: str, fail: bool, before: str) -> None:
    torch.set_float32_matmul_precision(before)
    torch.backends.cudnn.allow_tf32 = False
    state = _state()
    module = Looks(fail)
    if fail:
        with pytest.raises(KeyError, match="planned"):
            cuda_fit(module, **OWNERS[owner]("medium"))
    else:
        cuda_fit(module, **OWNERS[owner]("medium"))
    assert module.met[0] == "medium"
    assert _state() == state
    assert torch.backends.cudnn.allow_tf32 is False


@each_owner
@pytest.mark.parametrize("newer", ["tf32", "ieee"])
def test_a_users_newer_switch_neither_crashes_nor_is_lost(owner: str, newer: str) -> None:
    """Set through ``fp32_precision`` alone, torch's older getter may raise; during the run it never does."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has no newer switch")
    torch.backends.cuda.matmul.fp32_precision = newer
    state = _state()
    module = Looks()
    cuda_fit(module, **OWNERS[owner]("high"))
    assert module.met[0] == "high"
    assert _state() == state


def test_without_tf32_declared_the_setting_is_the_users() -> None:
    torch.set_float32_matmul_precision("medium")
    module = Looks()
    cuda_fit(module, plugins=[MixedPrecisionPlan("bf16-mixed")])
    assert module.met[0] == "medium"
