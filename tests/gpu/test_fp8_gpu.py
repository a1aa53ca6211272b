"""FP8 on CUDA: what is watched waits for nothing between readings, is the CPU's number, and compiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_mp.callbacks import TrainingHealth
from lightning_mp.monitor import metric_names
from lightning_mp.numerics.device import describe
from lightning_mp.policy import hardware
from support import fp8
from support.cuda import Resident
from support.fp8_faults import AT, FAULTS, LAYER, watched

pytest.importorskip("torchao")
CAPABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not CAPABLE, reason="needs a CUDA device of capability 8.9")]
#: on the device, with its own FP8 products
HERE: dict[str, Any] = {"accelerator": "gpu", "rule": {"emulate": False}}


class Silent(fp8.Language):
    """Keeps nothing that the host would have to read."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    def on_before_optimizer_step(self, optimizer: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class Texts(Resident):
    """Batches of one tensor each."""

    def __init__(self, count: int) -> None:
        self.batches = [batch.cuda() for batch in fp8.texts(rows=4 * count)]


class NothingWaits(Callback):
    """Makes waiting an error in warm batches without a reading."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx > 4 and batch_idx % 4:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_exception(self, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def test_between_readings_nothing_waits(tmp_path: Path) -> None:
    health = TrainingHealth(tmp_path, 4, report=False)
    how = {"callbacks": [health, NothingWaits()], "max_steps": 12, "accelerator": "gpu"}
    fp8.run(Silent(), fp8.plan(), data=Texts(12), **how)
    assert [row[metric_names.STEP] for row in health.fp8_rows] == [0, 4, 8]


@pytest.mark.parametrize("recipe", fp8.RECIPES)
def test_the_first_reading_is_the_cpus(recipe: str, tmp_path: Path) -> None:
    """Of the same weights and tokens: inputs of the first layer and weights are equal, gradients near."""
    here, _, _ = watched(tmp_path / "gpu", recipe, steps=1, **HERE)
    there, _, _ = watched(tmp_path / "cpu", recipe, steps=1)
    for layer, roles in there.fp8_rows[0]["layers"].items():
        mine = here.fp8_rows[0]["layers"][layer]
        assert mine["weight"] == pytest.approx(roles["weight"])
        for role in ("input", "gradient"):
            assert mine[role]["amax"] == pytest.approx(roles[role]["amax"], rel=0.1)


@pytest.mark.parametrize(("kind", "role"), FAULTS)
def test_a_planted_fault_is_found(kind: str, role: str, tmp_path: Path) -> None:
    health, _, _ = watched(tmp_path, steps=AT + 3, plant=FAULTS[kind, role], **HERE)
    event = next(event for event in health.events if event.kind == kind)
    assert (event.module, event.evidence["role"], event.action) == (LAYER, role, "log")


@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_compiled_by_inductor_it_is_seen_as_well(tmp_path: Path) -> None:
    plain, _, _ = watched(tmp_path / "plain", steps=3, **HERE)
    compiled, _, _ = watched(tmp_path / "compiled", steps=3, compiled="inductor", **HERE)
    for row, other in zip(compiled.fp8_rows, plain.fp8_rows, strict=True):
        for layer, roles in row["layers"].items():
            for role, numbers in roles.items():
                assert numbers["amax"] == pytest.approx(other["layers"][layer][role]["amax"], rel=0.1)


def test_mfu_counts_fp8_products_at_fp8s_peak(tmp_path: Path) -> None:
    known = describe(torch.device("cuda"))
    peaks = [hardware.peak(known, dtype) for dtype in ("bf16", "fp8")]
    if None in peaks:
        pytest.skip(f"no peak known of {known.name}")
    health, _, _ = watched(tmp_path, steps=4, **HERE)
    assert all(0 < row[metric_names.MFU] < 1 for row in health.rows[1:])
