"""``lightning_mp.compare`` on small modules: what is paired with what, what is measured, and what is left behind."""

import copy
import json
import logging
import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import FP8, MixedPrecisionPlan, PlanError, compare
from lightning_mp.comparison.compare import _Watch
from lightning_mp.comparison.compare import read_plans as read
from lightning_mp.compat import torchao
from lightning_mp.errors import Faults

WIDTH, ROWS, BATCH = 32, 48, 8
#: every layer of Net converted, computed as on a GPU
SMALL = MixedPrecisionPlan("fp8-mixed", fp8=FP8(recipe="tensorwise", small="convert", emulate=True))
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}


class Net(LightningModule):
    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.fails = fails

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.fails and self.trainer.precision == self.fails and torch.initial_seed() % 1000003 == 1:
            raise RuntimeError("not in\nthis seed")
        rows, wanted = batch
        loss = (self.layers(rows).float() - wanted.float()).pow(2).mean()
        return loss * torch.nan if self.fails == "nan" and self.trainer.precision == "bf16-mixed" else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        raise AssertionError("nothing is validated")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(ROWS, WIDTH, generator=generator)
    wanted = rows @ torch.randn(WIDTH, WIDTH, generator=generator) / 8
    return DataLoader(TensorDataset(rows, wanted), batch_size=BATCH, shuffle=True)


def compared(plans: Any, module: Any = Net, loader: Any = data, **given: Any) -> Any:
    return compare(module, loader, plans, **{"accelerator": "cpu", "seeds": 2, "steps": 10, **given})


def test_a_plan_against_itself_is_exactly_0(tmp_path: Path) -> None:
    said: list[str] = []
    # two epochs: the order of the second is the same as well
    found = compared("bf16-mixed,bf16-mixed", out=tmp_path, say=said.append)
    assert (found.mean_difference, found.standard_error, found.verdict) == (0.0, 0.0, "same")
    one, other = found.plans
    assert [run.losses for run in one.runs] == [run.losses for run in other.runs]
    assert one.runs[0].losses != one.runs[1].losses, "seeds differ"
    assert [line.partition(":")[0] for line in said] == [
        "2 plans, two steps of each first ...",
        "seed 1 of 2, bf16-mixed",
        "seed 1 of 2, bf16-mixed (2)",
        "seed 2 of 2, bf16-mixed (2)",
        "seed 2 of 2, bf16-mixed",
    ], "the plans take turns"
    written = json.loads((tmp_path / "compare.json").read_text())
    assert (written["mean_difference"], written["standard_error"], written["verdict"]) == (0.0, 0.0, "same")
    assert "bf16-mixed (2)" in str(found)
    assert "same" in str(found)


@pytest.mark.slow
def test_the_losses_are_those_of_a_plain_run_of_each_plan() -> None:
    found = compared("32-true,bf16-mixed", steps=8, accumulate_grad_batches=2)
    watched: list[float] = []

    class Watch(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            watched.append(2 * float(args[2]["loss"]))  # Lightning shows it divided by the micro-batches

        on_fit_start = _Watch.on_fit_start
        on_train_start = _Watch.on_train_start
        on_train_epoch_end = _Watch.on_train_epoch_end
        _seed = _Watch._seed
        seed = 1

    seed_everything(1, verbose=False)
    alone = {"accumulate_grad_batches": 2, "max_steps": 8, "max_epochs": -1, "limit_val_batches": 0, **QUIET}
    with mock.patch.object(Net, "validation_step", LightningModule.validation_step):
        Trainer(precision="bf16-mixed", accelerator="cpu", callbacks=[Watch()], **alone).fit(Net(), data())
    losses = [(a + b) / 2 for a, b in zip(watched[::2], watched[1::2], strict=True)]
    assert found.plans[1].runs[1].losses == pytest.approx(losses, rel=1e-6)
    assert found.final_loss_steps == 1
    assert found.plans[1].runs[1].final_loss == found.plans[1].runs[1].losses[-1]
    assert found.differences[0].differences[1] == pytest.approx(losses[-1] - found.plans[0].runs[1].losses[-1])


def test_what_is_measured() -> None:
    found = compared("32-true,bf16-true", steps=20, seeds=1)
    assert (found.verdict, found.standard_error) == ("undecided", None)
    assert found.final_loss_steps == 2
    full, half = (plan.peak_bytes.mean for plan in found.plans)
    parameters = sum(parameter.numel() for parameter in Net().parameters())
    # weights, gradients and two moments, of 4 bytes and of 2; activations and batches besides
    assert 16 * parameters < full < 32 * parameters
    assert 0.4 * full < half < 0.7 * full
    for plan in found.plans:
        assert plan.unit == "samples"
        assert plan.rate.mean > 0
        assert plan.rate.sd is None


def _wrong(product: Any) -> Any:

    def make(recipe: str, *, emulate: bool) -> Any:
        multiply = product(recipe, emulate=emulate)
        return lambda rows, weight_t: multiply(rows, weight_t / 64)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("planted", [True, False])
def test_a_wrong_scale_is_worse(planted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if planted:
        monkeypatch.setattr(torchao, "product", _wrong(torchao.product))
    found = compared({"bf16": "bf16-mixed", "fp8": SMALL}, seeds=3, steps=12, margin=0.02)
    assert found.verdict == ("worse" if planted else "same"), str(found)
    assert found.mean_difference != 0


def test_nothing_is_left_behind() -> None:
    module, environment = Net(), dict(os.environ)
    weights = copy.deepcopy(module.state_dict())
    level = logging.getLogger("lightning.pytorch").level
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    compared("bf16-mixed,a100", module, seeds=1, steps=2, deterministic=True)
    compared("bf16-mixed,a100", module, seeds=1, steps=2, benchmark=True)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert dict(os.environ) == environment
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert logging.getLogger("lightning.pytorch").level == level
    assert all(torch.equal(module.state_dict()[name], value) for name, value in weights.items())
    assert module._trainer is None


def test_a_plan_that_fails_in_a_seed_is_said_and_the_rest_stands(tmp_path: Path) -> None:
    found = compared("32-true,bf16-mixed", lambda: Net("bf16-mixed"), seeds=3, steps=2, out=tmp_path)
    fails = found.plans[1]
    assert [run.error for run in fails.runs] == [None, "RuntimeError: not in this seed", None]
    assert fails.failed == fails.runs[1:2]
    assert sorted(found.differences[0].differences) == [0, 2]
    assert found.verdict == "same"
    assert [run.error for run in found.plans[0].runs] == [None] * 3
    assert "bf16-mixed, seed 1, failed: RuntimeError: not in this seed" in str(found)
    assert "not in this seed" in (tmp_path / "compare.html").read_text()


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        (
            {"plans": "bf16-mixd,none.yaml", "seeds": 0, "steps": 0, "margin": -1.0, "module": 3, "max_steps": 5},
            ["bf16-mixd", "none.yaml", "seeds=0", "steps=0", "margin=-1.0", "module", "max_steps=5"],
        ),
        ({"module": nn.Linear(2, 2)}, ["module, a Linear"]),
        (
            {"plans": ["fp8-mixed", SMALL, "bf16-mixed"]},
            ["fp8-mixed: precision='fp8-mixed' on a model of which nothing"],
        ),
        ({"devicez": 2}, ["devicez"]),
        ({"seed": 3}, ["Did you mean 'seeds'"]),
        ({"strategy": "mp_dpp"}, ["mp_dpp"]),
        ({"out": Path(__file__)}, ["is a file"]),
    ],
    ids=["all at once", "module", "small", "argument", "near", "strategy", "out"],
)
def test_refused(given: dict[str, Any], faults: list[str]) -> None:
    with pytest.raises(PlanError) as error:
        compared(**{"plans": "bf16-mixed,32-true", **given})
    assert len(error.value.faults) == len(faults), str(error.value)
    for text in faults:
        assert text in str(error.value)
    if "fp8" in faults[0]:
        assert "small='convert'" in str(error.value)


def test_batches_that_differ_are_refused() -> None:
    rows, generator = torch.ones(ROWS, WIDTH).cumsum(0), torch.Generator().manual_seed(0)
    kept = DataLoader(TensorDataset(rows, rows), batch_size=BATCH, shuffle=True, generator=generator)
    with pytest.raises(PlanError, match="plan met other batches"):
        compared("32-true,32-true", loader=kept, seeds=1)


def test_weights_that_differ_are_refused() -> None:
    def module() -> Net:
        made = Net()
        nn.init.constant_(made.layers[0].weight, next(counter))
        return made

    counter = iter(range(1, 9))
    with pytest.raises(PlanError, match="plan began with other weights"):
        compared("32-true,32-true", module, seeds=1)


def test_names(tmp_path: Path) -> None:
    file = tmp_path / "narrow.yaml"
    file.write_text("precision: fp8-mixed\nfp8: {recipe: tensorwise, small: convert}\n")
    with Faults() as faults:
        found = read(f"bf16-mixed, fp16,a100,bf16-mixed,{file},{file}", faults)
    assert list(found) == ["bf16-mixed", "fp16", "a100", "bf16-mixed (2)", "narrow", "narrow (2)"]
    assert found["fp16"].precision == "16-mixed"
    assert found["a100"].tf32 == "high"
    assert found["narrow"].fp8 == FP8(recipe="tensorwise", small="convert")


@pytest.mark.parametrize(
    ("plans", "given", "fix"),
    [
        ("bf16-mixed,bf17-mixed", "config 'bf17-mixed', which is no file", "'bf16-mixed'"),
        ("bf16-mixed,none.yaml", "config 'none.yaml', which is no file", "path"),
        ("bf16-mixed", "1 plan", "bf16-mixed,fp8-mixed"),
        ("", "0 plans", "bf16-mixed,fp8-mixed"),
        ([{"precision": "bf16-mixed", "pinz": {}}, "bf16"], "unknown key pinz", "'pins'"),
        ([3.5, "bf16"], "a config of type float", "bf16"),
    ],
)
def test_refused_plans(plans: Any, given: str, fix: str) -> None:
    faults = Faults()
    read(plans, faults)
    (fault,) = faults.found
    assert given in fault.problem
    assert fix in fault.fix or fix in fault.allowed
