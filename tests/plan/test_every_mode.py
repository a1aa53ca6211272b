"""What every mode owes whatever it is called, what ``auto`` chooses, and what becomes of a half model."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import MixedPrecisionPlan
from support.comparing import same
from support.models import HIDDEN, Regression, batches
from support.norms import Normed, run
from support.oracles import MODES, plan_for
from support.running import fit, trainer
from support.traces import lightning_says

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

COMPUTED = {"32-true": FP32, "bf16-mixed": BF16, "16-mixed": FP16, "bf16-true": BF16, "16-true": FP16}
every_mode = pytest.mark.parametrize("mode", MODES)


class Evaluated(Regression):
    """Records the dtype of its prediction's product in each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.met: dict[str, torch.dtype] = {}
        self.results: dict[str, float] = {}

    def _evaluate(self, stage: str, batch: Any) -> None:
        self.met[stage] = self.net(batch[0]).dtype
        self.results[stage] = float(self.loss(batch))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._evaluate("predict", batch)
        return self.net(batch[0])


@every_mode
def test_every_stage_runs_in_the_same_compute_dtype(mode: str) -> None:
    module = Evaluated()
    runner = trainer(plugins=[plan_for(mode)], num_sanity_val_steps=0)
    runner.fit(module, batches(), batches())
    runner.validate(module, batches(), verbose=False)
    runner.test(module, batches(), verbose=False)
    runner.predict(module, batches())
    computed = COMPUTED[mode]
    assert module.met == {"validate": computed, "test": computed, "predict": computed}
    assert module.results["validate"] == module.results["test"] == module.results["predict"]


class Buffered(Regression):
    """Has a floating and a counting buffer, under a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(HIDDEN))

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


@pytest.mark.parametrize(
    ("mode", "buffer_dtype", "expected"),
    [
        ("16-mixed", None, FP32),
        ("bf16-true", None, BF16),
        ("16-true", None, FP16),
        ("bf16-true", "fp32", FP32),
        ("16-true", "fp32", FP32),
    ],
)
def test_floating_buffers_follow_the_parameters_or_buffer_dtype(
    mode: str, buffer_dtype: str | None, expected: torch.dtype
) -> None:
    module = Buffered()
    plan = plan_for(mode, buffer_dtype=buffer_dtype)
    trainer(plugins=[plan]).validate(module, batches(), verbose=False)
    norm = module.net[1]
    assert norm.running_mean.dtype == norm.running_var.dtype == expected
    assert norm.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(("mode", "kept"), [("16-true", False), ("16-mixed", True)])
def test_16_true_divides_small_gradients_in_fp16_and_says_so(
    mode: str, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Under 2**-14 they lose bits, under 2**-25 they are 0, however large the scale was in the backward pass."""
    true = torch.tensor([1.2345e-3, 1.2345e-6, 2e-8])

    class Small(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.zeros(3))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx).float() + (self.small.float() * true).sum()

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.seen = self.small.grad.float()

    module = Small()
    with caplog.at_level(logging.INFO):
        fit(module, plugins=[plan_for(mode)], max_steps=1)
    error = (module.seen / true - 1).abs().tolist()
    assert error[0] < 2**-10
    assert (error[1] < 2**-10, error[2] < 2**-10) == (kept, kept)
    assert (module.seen[2] == 0).item() is not kept
    said = [record.getMessage() for record in caplog.records if "divides gradients" in record.getMessage()]
    assert (len(said) == 1, all(len(line) <= 160 for line in said)) == (not kept, True)


def test_auto_on_a_small_model_and_a_cpu_is_fp32_and_the_reason_is_logged() -> None:
    module, plan, oracle = Regression(), MixedPrecisionPlan("auto"), Regression()
    assert plan.precision == "auto"
    with lightning_says() as lines:
        fit(module, plugins=[plan])
    assert plan.precision == plan.policy.precision == "32-true"
    (said,) = (line for line in lines if "'auto' is '32-true'" in line)
    assert "below 100M" in said
    fit(oracle, precision="32-true")
    assert module.losses == oracle.losses
    assert plan.state_dict()["policy"]["precision"] == "auto"


MADE = {"half": nn.Module.half, "bfloat16": nn.Module.bfloat16}
MASTERS = ("32-true", "bf16-mixed", "16-mixed")


def _made(how: str, module: nn.Module, back: bool = False) -> None:
    MADE[how](module)
    if back:
        module.float()


@pytest.mark.parametrize("pins", [None, {"BatchNorm1d": "fp32"}])
@pytest.mark.parametrize("mode", MASTERS)
@pytest.mark.parametrize("how", MADE)
def test_it_trains_as_one_that_was_made_fp32_again(how: str, mode: str, pins: Any) -> None:
    found, expected = (
        run("single", mode, Normed(prepare=partial(_made, how, back=b)), pins=pins) for b in (False, True)
    )
    assert same(found, expected)


class Odd(nn.Module):
    """A parameter of one half dtype, and buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.inner = nn.Module()  # as a rotary embedding: without parameters
        kinds = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool
        for kind in kinds:
            self.inner.register_buffer(f"b_{str(kind)[6:]}", torch.ones(2).to(kind))


@pytest.mark.parametrize("mode", MASTERS)
def test_buffers_of_another_dtype_than_the_weights_stay_what_they_were_made(mode: str) -> None:
    MixedPrecisionPlan(mode).apply(odd := Odd())
    assert odd.weight.dtype == torch.float32
    found = {name[2:]: str(tensor.dtype)[6:] for name, tensor in odd.inner.named_buffers()}
    assert found.pop("bfloat16") == "float32"
    assert all(name == dtype for name, dtype in found.items())
