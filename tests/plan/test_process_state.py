"""Complaint 7 (PL 21256), and the rest of what a plugin could leave behind in the process: nothing, on any exit."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from torch._functorch import config as functorch_config
from torch.optim import SGD

from lightning_mp import MixedPrecisionPlan, PlanError, callbacks
from lightning_mp.callbacks import ActivationCheckpointing, DtypePinning
from lightning_mp.policy.hardware import Device
from support.language import Language, gpt2, tokens
from support.models import Regression, same_weights, weights
from support.oracles import plan_for, stock_for
from support.running import fit
from support.tf32 import readings
from support.traces import lightning_says, same_runs, traced


def _state() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "matmul": torch.get_float32_matmul_precision(),
            "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            "default dtype": torch.get_default_dtype(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "autocast dtype": torch.get_autocast_dtype("cpu"),
            "autocast cache": torch.is_autocast_cache_enabled(),
            "autocast in compiled backward passes": functorch_config.backward_pass_autocast,
            "grad": torch.is_grad_enabled(),
            "forward hooks": len(torch.nn.modules.module._global_forward_hooks),
        }


class Looks(Regression):
    def on_train_start(self) -> None:
        self.met = _state()


OWNERS: dict[str, Any] = {
    "plan": lambda setting: {"plugins": [MixedPrecisionPlan("32-true", tf32=setting)]},
    "callback": lambda setting: {"callbacks": [callbacks.EnableTF32(setting)]},
}
each_owner = pytest.mark.parametrize("owner", OWNERS)


@pytest.mark.parametrize("setting", ["high", "medium", "highest"])
@each_owner
def test_on_a_cpu_tf32_changes_nothing_and_says_so(owner: str, setting: str) -> None:
    """One config must serve laptop and cluster (DESIGN section 2, small print)."""
    before, module, plain = _state(), Looks(), Regression()
    with lightning_says() as lines:
        fit(module, **OWNERS[owner](setting))
    within = {"grad": True, "autocast in compiled backward passes": "off" if owner == "plan" else "same_as_forward"}
    assert {**module.met, **within} == {**before, **within}
    assert _state() == before
    (said,) = (line for line in lines if "TF32" in line)
    assert re.fullmatch(rf".*{setting}'\)? changes nothing on cpu: it has no TF32", said, re.IGNORECASE)
    fit(plain, precision="32-true")
    assert module.losses == plain.losses


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
def test_autocast_is_on_in_the_forward_and_off_in_the_backward(mode: str) -> None:
    """PyTorch recommends no autocast in the backward, and a pinned module's backward must not be cast down by it."""

    class Looks(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.inside = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(self._backward)
            if not self.automatic_optimization:
                self.manual_backward(loss)
                self.optimizers().step()
            return loss

        def _backward(self, gradient: Any) -> None:
            self.in_backward = torch.is_autocast_enabled("cpu")

    for automatic in (True, False):
        module = Looks()
        module.automatic_optimization = automatic
        fit(module, plugins=[plan_for(mode)], max_steps=1)
        assert module.inside == (True, False)  # without the cache, as in stock Lightning (complaint 9, PL 21611)
        assert module.in_backward is False, f"automatic_optimization={automatic}"


def _after_a_newer_switch(owner: str) -> tuple[str, bool]:
    torch.backends.cudnn.conv.fp32_precision = "ieee"  # pyright: ignore[reportAttributeAccessIssue]
    before = readings()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("plan", "acting"):
            patch.setattr(f"lightning_mp.plan.{module}.describe", lambda _: Device("cuda", "NVIDIA A100", (8, 0)))
        with pytest.raises(PlanError) as refused:
            fit(Regression(), **OWNERS[owner]("high"))
    return str(refused.value), readings() == before


@each_owner
def test_tf32_that_a_newer_switch_has_set_is_refused_before_the_run(owner: str, pristine: Callable[..., Any]) -> None:
    text, untouched = pristine(_after_a_newer_switch, owner)
    assert "torch.backends.fp32_precision, or that of a backend, was set" in text
    assert untouched


class Described(RichProgressBar):
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self.said = self._get_train_description(0).strip()


def test_a_run_without_a_limit_of_epochs_leaves_no_filter() -> None:
    with warnings.catch_warnings():
        before, bar = list(warnings.filters), Described()
        fit(
            Regression(),
            plugins=[MixedPrecisionPlan("bf16-mixed")],
            callbacks=[bar],
            enable_progress_bar=True,
            max_steps=2,
            max_epochs=-1,
        )
        assert list(warnings.filters) == before
    assert bar.said == "Epoch 0"
    assert "_get_train_description" not in vars(bar)


FP32 = torch.float32
sgd = partial(SGD, lr=1e-3)


def test_an_fp16_pin_under_stock_16_mixed_is_refused_before_the_first_step() -> None:
    """Complaint 5 (PL 5140): torch's GradScaler stops at the first step, "Attempting to unscale FP16 gradients"."""
    module = Regression(sgd)
    with pytest.raises(PlanError, match="fp16"):
        fit(module, callbacks=[DtypePinning({"LayerNorm": "fp16"})], **stock_for("16-mixed"))
    assert module.losses == []


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_it_trains_what_the_plan_with_these_pins_trains(mode: str) -> None:
    pins = {"LayerNorm": "fp32", "net.3": "bf16"}
    stock = traced(Regression(sgd), DtypePinning(pins), **stock_for(mode))
    assert same_runs(stock, traced(Regression(sgd), plugins=[plan_for(mode, pins=pins)]))


class Held(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.bytes = 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            self.bytes += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_numbers_are_those_without_it_and_less_is_kept(mode: str) -> None:
    plain, checkpointed = Held(gpt2()), Held(gpt2())
    fit(plain, data=tokens(), **stock_for(mode))
    fit(checkpointed, data=tokens(), callbacks=[ActivationCheckpointing("GPT2Block")], **stock_for(mode))
    assert plain.losses == checkpointed.losses
    assert same_weights(weights(plain), weights(checkpointed))
    assert checkpointed.bytes < 0.5 * plain.bytes
