"""What the doctor says of a model, its weights and its device; what can be run to see whether it is true is run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

from lightning_mp import FP8, MixedPrecisionPlan, PlanError, callbacks
from lightning_mp.policy.hardware import Device
from support import hf, language
from support.doctor import A100, OLD, V100, Residual, Tagger, Wrapped, bert, found, net, resnet
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


def test_a_model_that_from_pretrained_returned_is_in_eval_mode(tmp_path: object) -> None:
    from transformers import GPT2LMHeadModel

    hf.gpt2(dropout=0.1).save_pretrained(str(tmp_path))
    loaded = GPT2LMHeadModel.from_pretrained(str(tmp_path))
    finding = found(Wrapped(loaded), MixedPrecisionPlan("bf16-mixed"))["eval_mode"]
    assert finding.severity == "warning"
    assert finding.where == "model"
    assert finding.fix.startswith("call self.model.train() ")
    assert "dropout, batch statistics" in finding.why
    assert found(Wrapped(loaded.train()), MixedPrecisionPlan("bf16-mixed")) == {}


def test_the_outermost_modules_in_eval_mode_are_named() -> None:
    model = resnet()
    model[2].eval()
    model[3].eval()
    finding = found(model, "32-true")["eval_mode"]
    assert finding.what.endswith(": 2, 3")


def test_a_frozen_part_and_a_frozen_norm_belong_in_eval_mode() -> None:
    model = resnet()
    model[2].eval().requires_grad_(False)
    model[1].eval()
    model[3].body[1].eval()
    assert isinstance(model[3], Residual)
    assert found(model, "32-true") == {}


BLOCKS = ("LlamaDecoderLayer", "GPT2Block")


NAME = "lora_checkpoint_no_input_grads"


def _enable(model: Any, **options: Any) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)


def _wrap(model: nn.Module, how: CheckpointImpl) -> None:
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=how),
        check_fn=lambda module: type(module).__name__ in BLOCKS,
    )


def _lora(build: Any, *, reentrant: bool, input_gradients: bool) -> Any:
    model = build(lora=True)
    model.config.use_cache = False
    _enable(model, use_reentrant=reentrant)
    for hooked in (model, model.base_model.model):
        hooked.disable_input_require_grads()
    if input_gradients:
        model.enable_input_require_grads()
    return model


def _gradients(model: nn.Module) -> int:
    """How many trained weights get a gradient."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True", UserWarning)
        loss = hf.loss_of(model, hf.tokens())
    if loss.requires_grad:
        loss.backward()
    return sum(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("build", [hf.llama, hf.gpt2])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("input_gradients", [True, False])
def test_lora_is_found_to_train_nothing_exactly_where_it_does(
    build: Any, reentrant: bool, input_gradients: bool
) -> None:
    model = _lora(build, reentrant=reentrant, input_gradients=input_gradients)
    findings = found(model, "bf16-mixed")
    trained = _gradients(model)
    assert (NAME in findings) == (trained == 0)
    if trained:
        assert findings == {}
    else:
        assert findings[NAME].severity == "error"
        assert "2 blocks" in findings[NAME].what
        assert "backward raises" in findings[NAME].why
        assert "enable_input_require_grads()" in findings[NAME].fix


@pytest.mark.parametrize("how", list(CheckpointImpl))
def test_torchs_wrapper_is_looked_through_as_well(how: CheckpointImpl) -> None:
    model = hf.llama(lora=True)
    model.config.use_cache = False
    model.base_model.model.disable_input_require_grads()
    _wrap(model, how)
    assert (NAME in found(model, "bf16-mixed")) == (_gradients(model) == 0) == (how is CheckpointImpl.REENTRANT)


def test_a_head_trained_beside_lora_is_all_that_learns() -> None:
    model = _lora(hf.llama, reentrant=True, input_gradients=False)
    model.get_output_embeddings().weight.requires_grad_(True)
    finding = found(model, "bf16-mixed")[NAME]
    assert "only base_model.model.lm_head.weight and what is behind do" in finding.why
    assert _gradients(model) == 1


def test_what_may_feed_the_blocks_from_outside_is_left_alone() -> None:
    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = _lora(hf.llama, reentrant=True, input_gradients=False)
            self.eyes = nn.Linear(8, 16)

    assert found(Seeing(), "32-true") == {}


def test_the_plans_own_checkpointing_trains_lora() -> None:
    model = hf.llama(lora=True)
    model.config.use_cache = False
    model.base_model.model.disable_input_require_grads()
    assert found(model, MixedPrecisionPlan("bf16-mixed", checkpointing="LlamaDecoderLayer")) == {}


# ------------------------------------------------------------------ use_cache
@pytest.mark.parametrize("build", [hf.llama, hf.gpt2])
def test_a_cache_beside_transformers_checkpointing(build: Any) -> None:
    model = build()
    _enable(model)
    finding = found(model, "bf16-mixed")["use_cache_while_checkpointing"]
    assert finding.severity == "warning"
    assert "use_cache = False" in finding.fix
    model.config.use_cache = False
    assert found(model, "bf16-mixed") == {}


def test_beside_torchs_reentrant_wrapper_a_cache_makes_gradients_wrong() -> None:
    plain, model = hf.llama(), hf.llama()
    _wrap(model, CheckpointImpl.REENTRANT)
    assert found(model, "32-true")["use_cache_while_checkpointing"].severity == "error"
    for each in (plain, model):
        each.get_input_embeddings().requires_grad_(True)
        hf.loss_of(each, hf.tokens()).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert not all(torch.allclose(one.grad, other.grad, atol=1e-6) for one, other in pairs)


def test_a_plan_turns_it_off_itself() -> None:
    plan = MixedPrecisionPlan("bf16-mixed", checkpointing="LlamaDecoderLayer")
    assert found(hf.llama(), plan)["use_cache_while_checkpointing"].severity == "info"


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


def test_fp32_has_no_such_sizes_and_a_pin_to_it_excepts_a_layer() -> None:
    assert found(nn.Linear(15, 17), "32-true") == {}
    assert "dims_not_aligned" in found(nn.Sequential(nn.Linear(15, 17)), "bf16-mixed")
    pinned = {"precision": "bf16-mixed", "pins": {"0": "fp32"}}
    assert found(nn.Sequential(nn.Linear(15, 17)), pinned) == {}


H100 = Device("cuda", "NVIDIA H100", (9, 0))


def fp8(**fields: object) -> MixedPrecisionPlan:
    return MixedPrecisionPlan("fp8-mixed", fp8=FP8(**fields))  # type: ignore[arg-type]


def test_dimensions_are_to_be_multiples_of_16() -> None:
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 32), nn.Linear(32, 32))
    assert "not multiples of 16" in found(model, fp8(small="convert"))["dims_not_aligned"].what
    assert found(model, "bf16-mixed") == {}


def test_fp8_on_a_gpu_that_the_run_refuses_is_an_error() -> None:
    finding = found(net(), fp8(small="convert"), device=A100)["precision_refused"]
    assert finding.severity == "error"
    assert "capability 8.9" in finding.why
    assert "'bf16-mixed'" in finding.fix
    for plan, device in ((fp8(emulate=True), A100), (fp8(), H100), ("bf16-mixed", A100)):
        assert "precision_refused" not in found(net(), plan, device=device)
    assert "precision_refused" not in found(net(), fp8(), None, {"accelerator": "gpu"}, device=None)  # one not here


TRUE = ("bf16-true", "16-true")


class OwnNorm(nn.Module):
    """An RMS norm of someone's own; how it squares decides what it sums over."""

    def __init__(self, width: int = 16, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


class CastingNorm(OwnNorm):
    """As in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def _with(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), norm)


def _unwarned(model: nn.Module, plan: Any, **options: Any) -> dict[str, Any]:
    """The findings but for what every true mode is told."""
    findings: dict[str, Any] = found(model, plan, **options)
    findings.pop("no_fp32_masters", None)
    return findings


@pytest.mark.parametrize("stock", [False, True])
@pytest.mark.parametrize("mode", TRUE)
@pytest.mark.parametrize(
    ("build", "kinds"),
    [(hf.gpt2, "5 norms (LayerNorm)"), (resnet, "5 norms (BatchNorm2d)"), (bert, "6 norms (LayerNorm)")],
)
def test_the_true_modes_run_norms_in_half(build: Callable[[], nn.Module], kinds: str, mode: str, stock: bool) -> None:
    finding = found(build(), mode if stock else MixedPrecisionPlan(mode))["norm_in_half"]
    assert finding.severity == "warning"
    assert kinds in finding.what
    assert "'fp32'" in finding.fix


@pytest.mark.parametrize(("norm", "half"), [(OwnNorm, True), (CastingNorm, False)])
def test_someones_own_norm_is_judged_by_what_it_does(norm: type[OwnNorm], half: bool) -> None:
    findings = _unwarned(_with(norm()), "bf16-true")
    assert set(findings) == ({"norm_in_half"} if half else set())
    assert found(_with(norm()), "bf16-mixed") == {}


@pytest.mark.parametrize("mode", TRUE)
def test_a_pin_mends_it(mode: str) -> None:
    assert _unwarned(hf.gpt2(), {"precision": mode, "pins": {"LayerNorm": "fp32"}}) == {}


def test_a_pin_can_also_bring_a_norm_into_half() -> None:
    finding = found(hf.gpt2(), {"precision": "16-mixed", "pins": {"h.0": "fp16"}})["norm_in_half"]
    assert "2 norms" in finding.what
    assert "a pin says so" in finding.why


# ------------------------------------------------------------------ eps
@pytest.mark.parametrize(
    ("eps", "vanishes"), [(1e-12, True), (1e-8, True), (1e-7, False), (1e-6, False), (1e-5, False)]
)
@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
def test_a_norms_eps_that_is_0_in_fp16(kind: Any, eps: float, vanishes: bool) -> None:
    model = _with(kind(16, eps=eps))
    assert ("eps_underflows" in found(model, "16-true")) == vanishes
    assert "eps_underflows" not in found(model, "bf16-true")
    assert "eps_underflows" not in found(model, "16-mixed")
    assert "eps_underflows" not in found(model, {"precision": "16-true", "pins": {kind.__name__: "fp32"}})
