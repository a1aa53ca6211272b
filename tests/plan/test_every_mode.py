"""DESIGN section 3 as a table, and what every mode owes whatever it is called."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from support.models import HIDDEN, Regression, batches
from support.oracles import MODES, plan_for
from support.running import fit, trainer
from support.traces import gradients

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

#: mode -> parameters stored, matrix products, gradients, optimizer state, loss scaling
TABLE = {
    "32-true": (FP32, FP32, FP32, FP32, False),
    "bf16-mixed": (FP32, BF16, FP32, FP32, False),
    "16-mixed": (FP32, FP16, FP32, FP32, True),
    "bf16-true": (BF16, BF16, BF16, BF16, False),
    "16-true": (FP16, FP16, FP16, FP16, True),
}
every_mode = pytest.mark.parametrize("mode", MODES)


class Dtypes(Callback):
    """The dtypes met while training, by hooks on what the run really computes."""

    def __init__(self) -> None:
        self.products: set[torch.dtype] = set()
        self.product_gradients: set[torch.dtype] = set()
        self.gradients: set[torch.dtype] = set()
        self.state: set[torch.dtype] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for module in pl_module.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.products.add(output.dtype)
        output.register_hook(lambda gradient: self.product_gradients.add(gradient.dtype))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients |= {gradient.dtype for gradient in gradients(pl_module).values()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for state in trainer.optimizers[0].state.values():
            self.state |= {state["exp_avg"].dtype, state["exp_avg_sq"].dtype}


@every_mode
def test_stores_computes_reduces_and_optimizes_in_the_dtypes_of_the_table(mode: str) -> None:
    """Complaint 5: one mode name means one set of dtypes."""
    stored, computed, gradient, state, scaled = TABLE[mode]
    module, seen = Regression(), Dtypes()
    plan = plan_for(mode)
    fit(module, plugins=[plan], callbacks=[seen])
    assert {p.dtype for p in module.parameters()} == {stored}
    assert seen.products == {computed}
    assert seen.product_gradients == {computed}
    assert seen.gradients == {gradient}
    assert seen.state == {state}
    assert (plan.scaler is not None) == scaled


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
    computed = TABLE[mode][1]
    assert module.met == {"validate": computed, "test": computed, "predict": computed}
    assert module.results["validate"] == module.results["test"] == module.results["predict"]


@every_mode
def test_fit_called_twice_goes_on(mode: str) -> None:
    """The second fit of one Trainer continues the run: the counts go on, and so do the weights."""
    module, plan = Regression(overflow_at=(2,)), plan_for(mode)
    runner = trainer(plugins=[plan])
    runner.fit(module, batches())
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)
    after_one = {name: p.detach().clone() for name, p in module.named_parameters()}
    runner.fit_loop.max_epochs = 2
    runner.fit(module, batches())
    assert (plan.applied_steps, plan.skipped_steps) == (15, 1)
    assert runner.global_step == 16
    assert any(not torch.equal(after_one[name], p) for name, p in module.named_parameters())


class Buffered(Regression):
    """Has a floating and a counting buffer, under a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(HIDDEN))


@pytest.mark.parametrize(
    ("mode", "buffer_dtype", "expected"),
    [
        ("32-true", None, FP32),
        ("bf16-mixed", None, FP32),
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
    trainer(plugins=[plan_for(mode, buffer_dtype=buffer_dtype)]).validate(
        _with_validation(module), batches(), verbose=False
    )
    norm = module.net[1]
    assert norm.running_mean.dtype == norm.running_var.dtype == expected
    assert norm.num_batches_tracked.dtype == torch.int64


def _with_validation(module: LightningModule) -> LightningModule:
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"validation_step": lambda self, batch, _: None})
    return module


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
