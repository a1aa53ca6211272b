"""What a device does slowly: emulated bf16, IEEE fp32, odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp import MixedPrecisionPlan, callbacks
from lightning_mp.policy.hardware import Device
from support import hf, language
from support.doctor import A100, CPU, OLD, V100, Tagger, bert, found, net, resnet
from support.oracles import MODES

EMULATING_CPU = Device("cpu", "CPU", bf16="emulated")


@pytest.mark.parametrize(("device", "severity"), [(V100, "warning"), (OLD, "error"), (EMULATING_CPU, "info")])
@pytest.mark.parametrize("plan", ["bf16-mixed", MixedPrecisionPlan("bf16-mixed")])
def test_bf16_on_a_device_without_it(device: Device, severity: str, plan: Any) -> None:
    finding = found(net(), plan, device=device)["bf16_emulated"]
    assert finding.severity == severity
    assert device.name in finding.what
    assert ("'32-true'" if device.type == "cpu" else "'16-mixed'") in finding.fix


def test_a_bf16_pin_counts() -> None:
    plan = {"precision": "16-mixed", "pins": {"2": "bf16"}}
    assert "bf16 pins on 2" in found(net(), plan, device=V100)["bf16_emulated"].what
    assert "bf16_emulated" not in found(net(), plan, device=A100)


@pytest.mark.parametrize(("plan", "device"), [("bf16-mixed", A100), ("bf16-mixed", CPU), ("16-mixed", V100)])
def test_native_bf16_and_none_at_all_are_healthy(plan: str, device: Device) -> None:
    assert found(net(), plan, device=device) == {}


# ------------------------------------------------------------------ TF32


@pytest.mark.parametrize("build", [net, hf.gpt2, Tagger])
@pytest.mark.parametrize("plan", ["32-true", MixedPrecisionPlan("32-true")])
def test_fp32_products_without_tf32(build: Any, plan: Any) -> None:
    finding = found(build(), plan, device=A100)["tf32_off"]
    assert finding.severity == "info"
    assert ("EnableTF32()" if isinstance(plan, str) else "tf32='high'") in finding.fix


def test_fp32_pins_on_layers_that_multiply_count() -> None:
    plan = {"precision": "bf16-mixed", "pins": {"2": "fp32"}}
    assert found(net(), plan, device=A100)["tf32_off"].where == "2"


@pytest.mark.parametrize("tf32", ["high", "medium", "highest"])
def test_whoever_said_something_about_tf32_meant_it(tf32: str) -> None:
    assert found(net(), MixedPrecisionPlan("32-true", tf32=tf32), device=A100) == {}


def test_tf32_that_is_on_is_healthy() -> None:
    enabled = {"callbacks": [callbacks.EnableTF32("high")]}
    assert found(net(), "32-true", None, enabled, device=A100) == {}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert found(net(), "32-true", device=A100) == {}
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("model", "plan", "device"),
    [
        (net(), "32-true", V100),
        (net(), "32-true", CPU),
        (net(), "bf16-mixed", A100),
        (nn.Conv2d(3, 8, 3), "32-true", A100),
    ],
)
def test_where_there_is_no_tf32_or_nothing_to_gain_nothing_is_said(model: nn.Module, plan: str, device: Device) -> None:
    assert found(model, plan, device=device) == {}


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize("vocabulary", [50257, 101])
@pytest.mark.parametrize("tied", [True, False])
def test_an_odd_vocabulary_is_named_and_padded(vocabulary: int, tied: bool) -> None:
    model = language.gpt2(vocab_size=vocabulary, tie_word_embeddings=tied).train()
    finding = found(model, "bf16-mixed")["dims_not_aligned"]
    assert finding.severity == "info"
    assert finding.where == "lm_head"
    assert f"the vocabulary, {vocabulary}" in finding.what
    padded = -(-vocabulary // 8) * 8
    assert f"resize_token_embeddings({padded})" in finding.fix
    model.resize_token_embeddings(padded)
    assert found(model, "bf16-mixed") == {}


def test_layers_of_odd_sizes_are_named_with_them() -> None:
    model = nn.Sequential(nn.Linear(30, 50), nn.ReLU(), nn.Linear(50, 7))
    finding = found(model, MixedPrecisionPlan("16-mixed"))["dims_not_aligned"]
    assert "0 (30 x 50), 2 (50 x 7)" in finding.what


def test_transformers_conv1d_is_a_linear_layer() -> None:
    model = language.gpt2(n_inner=100).train()
    assert "c_fc (32 x 100)" in found(model, "bf16-mixed")["dims_not_aligned"].what


def test_fp8_wants_multiples_of_16() -> None:
    model = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))
    assert found(model, "bf16-mixed") == {}
    finding = found(model, "transformer-engine")["dims_not_aligned"]
    assert "not multiples of 16" in finding.what


def test_fp32_has_no_such_sizes_and_a_pin_to_it_excepts_a_layer() -> None:
    assert found(nn.Linear(15, 17), "32-true") == {}
    assert "dims_not_aligned" in found(nn.Sequential(nn.Linear(15, 17)), "bf16-mixed")
    pinned = {"precision": "bf16-mixed", "pins": {"0": "fp32"}}
    assert found(nn.Sequential(nn.Linear(15, 17)), pinned) == {}


@pytest.mark.parametrize("build", [resnet, Tagger, lambda: bert(labels=True), hf.llama, lambda: hf.llama(lora=True)])
@pytest.mark.parametrize("mode", MODES[:3])
def test_a_small_head_a_looked_up_table_and_lora_are_healthy(build: Any, mode: str) -> None:
    assert found(build(), mode) == {}
