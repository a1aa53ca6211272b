"""``experiment=longspec`` on one GPU: what of the recipe a CPU cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mp import MixedPrecisionPlan
from support.cuda import DEVICE, cuda_fit
from support.deepspeed_json import WHOLE_FP16
from support.longspec import Experiment
from support.models import Regression
from support.ranks import run_ranks

_ampere = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not _ampere, reason="needs a CUDA device with TF32")]

FP32, FP16 = torch.float32, torch.float16
#: the same YAML, larger: 120 million parameters on one device
LONGSPEC = (
    "experiment=longspec",
    "trainer.devices=1",
    "trainer.max_steps=8",
    "data.context=512",
    "data.batch_size=16",
    "model.config.hidden_size=1024",
    "model.config.intermediate_size=2816",
    "model.config.num_hidden_layers=8",
    "model.config.num_attention_heads=16",
)
RUNS = {"recomputed": LONGSPEC, "kept": (*LONGSPEC, "plan.checkpointing=null")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Each run in a process of its own, so that what it takes of the device is its own."""
    pytest.importorskip("deepspeed")
    found: dict[str, Any] = {}
    for name, arguments in RUNS.items():
        (found[name],) = run_ranks(Experiment(arguments, tmp_path_factory.mktemp(name) / "run"), world=1, seconds=280)
    return found


def test_on_cuda_all_is_as_declared(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["recomputed"]
    assert run["audit"]["ok"], run["audit"]
    assert run["processes"] == (1, "nccl")
    assert run["fp16"] == WHOLE_FP16
    assert {weight.dtype for name, weight in run["end"].items() if "norm" in name} == {FP32}
    assert [dtypes for name, dtypes in run["dtypes"].items() if name.endswith("norm")] == [{(FP16, FP32)}] * 17


def test_on_cuda_tf32_is_on_while_it_trains_and_as_before_afterwards(runs: dict[str, dict[str, Any]]) -> None:
    run = runs["recomputed"]
    assert run["switches"] == (True, True)
    assert run["switches after"] == (False, True)  # torch's own


def test_on_cuda_recomputing_trains_the_same(runs: dict[str, dict[str, Any]]) -> None:
    losses, others = ([batch["loss"] for batch in runs[name]["batches"]] for name in RUNS)
    assert losses == pytest.approx(others, rel=1e-3)


class Multiplies(Regression):
    """Multiplies matrices while training under the plan."""

    def on_train_start(self) -> None:
        one = torch.eye(512, device=DEVICE)
        self.kept = {bits: bool((one * (1 + 2.0**-bits) @ one != one)[0, 0]) for bits in (10, 12, 23)}


@pytest.fixture(scope="module")
def products() -> dict[str, Multiplies]:
    """In fp32, with TF32 and without."""
    found = {setting: Multiplies() for setting in ("high", "highest")}
    for setting, module in found.items():
        cuda_fit(module, plugins=[MixedPrecisionPlan("32-true", tf32=setting)], max_steps=1)
    return found


def test_tf32_keeps_10_bits_of_mantissa_and_fp32_23(products: dict[str, Multiplies]) -> None:
    assert products["high"].kept == {10: True, 12: False, 23: False}
    assert products["highest"].kept == {10: True, 12: True, 23: True}
