"""TF32 on CUDA: what was declared is what products run in, the audit tells it from fp32, and raises no false alarm."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mp import MixedPrecisionPlan, PlanError
from lightning_mp.callbacks import EnableTF32
from lightning_mp.precision_audit.audit import PrecisionAudit
from support.cuda import Resident, cuda_fit
from support.language import Language, llama, tokens
from support.models import Regression, same_weights, weights
from support.oracles import MODES, plan_for

_ampere = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _ampere, reason="needs a CUDA device with TF32")]
OWNERS: dict[str, Any] = {
    "plan": lambda setting: {"plugins": [MixedPrecisionPlan("32-true", tf32=setting)]},
    "callback": lambda setting: {"callbacks": [EnableTF32(setting)]},
}
each_owner = pytest.mark.parametrize("owner", OWNERS)


class Looks(Regression):
    def on_train_start(self) -> None:
        generator = torch.Generator(self.device).manual_seed(0)
        a, b = (torch.randn(512, 512, device=self.device, generator=generator) for _ in range(2))
        self.error = ((a @ b).double() - a.double() @ b.double()).abs().max().item()
        self.met = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32


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


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


def _run(module: Any, folder: Path, on_mismatch: Any = "raise", **arguments: Any) -> dict[str, Any]:
    callback = PrecisionAudit(2, on_mismatch, folder)
    cuda_fit(module, callbacks=[callback], max_steps=2, **arguments)
    return {row.module: row for row in callback.rows}


@pytest.mark.parametrize(("setting", "found"), [("high", "tf32"), ("highest", "fp32"), (None, "fp32")])
def test_tf32_is_told_from_fp32(setting: str | None, found: str, tmp_path: Path) -> None:
    rows = _run(Regression(), tmp_path, plugins=[plan_for("32-true", tf32=setting, pins={"LayerNorm": "fp32"})])
    assert (rows["net.0"].declared, rows["net.0"].compute) == (found, found)
    assert (rows["net.1"].declared, rows["net.1"].compute) == ("fp32", "fp32")


def test_tf32_switched_behind_the_plan_is_found(tmp_path: Path) -> None:
    class Switches(Regression):
        def on_train_start(self) -> None:
            torch.set_float32_matmul_precision("highest")

    with pytest.raises(PlanError, match=r"net\.0, net\.3 \(2 modules\) computed in fp32\. Allowed: tf32"):
        _run(Switches(), tmp_path, plugins=[plan_for("32-true", tf32="high")])


@pytest.mark.parametrize("mode", MODES)
def test_no_false_alarm_and_the_same_numbers(mode: str, tmp_path: Path) -> None:
    module, oracle, data = Language(llama()), Language(llama()), Resident(tokens())
    plan = plan_for(mode, checkpointing="LlamaDecoderLayer")
    cuda_fit(oracle, plugins=[plan], data=data, max_steps=2)
    rows = _run(module, tmp_path, data=data, plugins=[plan_for(mode, checkpointing="LlamaDecoderLayer")])
    assert {row.ok for row in rows.values()} == {True}
    assert module.losses == oracle.losses
    assert same_weights(weights(module), weights(oracle))
