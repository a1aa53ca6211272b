"""Half-precision weights: no masters, no scaler that takes them, one tensor under two pins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import nn

from lightning_mp import MixedPrecisionPlan, PlanError
from support import hf
from support.doctor import Wrapped, found, net
from support.models import Regression
from support.running import fit


@pytest.mark.parametrize("plan", ["bf16-mixed", "16-mixed", "32-true"])
def test_half_weights_under_a_stock_plugin_have_no_masters(plan: str) -> None:
    finding = found(net().bfloat16(), plan)["no_fp32_masters"]
    assert finding.severity == "warning"
    assert "4 trained weights in bf16" in finding.what
    assert "2**-8" in finding.why
    assert "dtype=torch.float32" in finding.fix
    assert finding.where == "0.weight"


@pytest.mark.parametrize("plan", ["bf16-mixed", "16-mixed", "32-true"])
def test_a_plan_makes_masters_of_them_and_says_what_that_costs(plan: str) -> None:
    finding = found(net().bfloat16(), MixedPrecisionPlan(plan))["no_fp32_masters"]
    assert finding.severity == "info"
    assert "at twice the memory" in finding.why


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize(("plan", "dtype"), [("bf16-true", "bf16"), ("16-true", "fp16")])
def test_the_true_modes_have_none(plan: str, dtype: str, stock: bool) -> None:
    finding = found(net(), plan if stock else MixedPrecisionPlan(plan))["no_fp32_masters"]
    assert finding.severity == "warning"
    assert f"stored in {dtype} alone" in finding.what
    assert plan.replace("true", "mixed") in finding.fix


def test_pins_that_store_in_half_are_named() -> None:
    finding = found(net(), {"precision": "bf16-mixed", "pins": {"2": "bf16"}})["no_fp32_masters"]
    assert finding.severity == "info"
    assert finding.what.endswith(": 2.weight, 2.bias")
    assert "no_fp32_masters" not in found(net(), {"precision": "bf16-true", "pins": {"Linear": "fp32"}})
    loaded = net()
    loaded[2].bfloat16()
    assert found(loaded, {"precision": "bf16-mixed", "pins": {"2": "bf16"}}) == {"no_fp32_masters": finding}


@pytest.mark.parametrize("plan", ["bf16-mixed", "32-true", MixedPrecisionPlan("bf16-mixed")])
def test_fp32_weights_and_frozen_half_ones_are_healthy(plan: Any) -> None:
    assert found(net(), plan) == {}
    model = net()
    model[0].bfloat16().requires_grad_(False)
    assert found(model, plan) == {}


# ------------------------------------------------------------------ fp16 beside a scaler


def test_a_stock_scaler_refuses_fp16_weights_and_so_does_the_doctor() -> None:
    model = Regression(lambda p: torch.optim.SGD(p, lr=1e-3)).half()
    finding = found(model, "16-mixed")["fp16_params_under_scaler"]
    assert finding.severity == "error"
    assert finding.where == "net.0.weight"
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        fit(model, plugins=[MixedPrecision("16-mixed", "cpu")])


def test_a_plan_trains_them_and_the_doctor_only_says_so() -> None:
    model = Regression(lambda p: torch.optim.SGD(p, lr=1e-3)).half()
    plan = MixedPrecisionPlan("16-mixed")
    assert found(model, plan)["fp16_params_under_scaler"].severity == "info"
    fit(model, plugins=[plan])
    assert len(model.losses) == 8


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (net(), "16-mixed"),
        (net().bfloat16(), "16-mixed"),
        (net().half(), "bf16-mixed"),
        (net().half(), MixedPrecisionPlan("16-true")),
        (net(), {"precision": "16-mixed", "pins": {"2": "fp16"}}),
    ],
)
def test_where_no_torch_scaler_meets_fp16_gradients_nothing_is_said(model: nn.Module, plan: Any) -> None:
    assert "fp16_params_under_scaler" not in found(model, plan)


def test_a_frozen_fp16_base_is_healthy() -> None:
    model = net()
    model[0].half().requires_grad_(False)
    assert found(model, "16-mixed") == {}


# ------------------------------------------------------------------ ties


def test_contradicting_pins_on_a_tied_weight_are_what_the_run_refuses() -> None:
    model = Wrapped(hf.gpt2(), torch.optim.SGD)
    pins = {"wte": "fp32", "lm_head": "bf16"}
    finding = found(model, {"precision": "bf16-mixed", "pins": pins})["tied_weights_conflicting_pins"]
    assert finding.severity == "error"
    assert finding.where == "model.transformer.wte.weight"
    assert "pinned to fp32" in finding.what
    assert "pinned to bf16" in finding.what
    assert "tie_word_embeddings=False" in finding.fix
    with pytest.raises(PlanError, match="contradicting pins on tied weights"):
        fit(model, plugins=[MixedPrecisionPlan("bf16-mixed", pins=pins)])


@pytest.mark.parametrize("pins", [{"wte": "fp32"}, {"wte": "fp32", "lm_head": "fp32"}])
def test_pins_that_agree_about_it_are_healthy(pins: dict[str, str]) -> None:
    assert found(hf.gpt2(), {"precision": "bf16-mixed", "pins": pins}) == {}
