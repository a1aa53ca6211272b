"""What the doctor says of a model, its weights and its device; what can be run to see whether it is true is run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
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

from lightning_mp import FP8, MixedPrecisionPlan, callbacks
from lightning_mp.policy.hardware import Device
from support import hf, language
from support.doctor import A100, OLD, V100, Residual, Tagger, Wrapped, bert, found, net, resnet
from support.models import Regression
from support.running import fit

Plan = MixedPrecisionPlan
H100 = Device("cuda", "NVIDIA H100", (9, 0))
EMULATING_CPU = Device("cpu", "CPU", bf16="emulated")
MASTERS, PINNED_BF16 = "no_fp32_masters", {"precision": "bf16-mixed", "pins": {"2": "bf16"}}


def fp8(**fields: object) -> MixedPrecisionPlan:
    return Plan("fp8-mixed", fp8=FP8(**fields))  # type: ignore[arg-type]


def half(dtype: torch.dtype = torch.bfloat16, *layers: int) -> nn.Sequential:
    """The net with all of it, or those layers, in half precision."""
    model = net()
    for layer in layers or (0, 2):
        model[layer].to(dtype)
    return model


def with_norm(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), norm)


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


def parts_in_eval_mode() -> nn.Module:
    model = resnet()
    model[2].eval()
    model[3].eval()
    return model


def checkpointed(build: Any) -> nn.Module:
    model = build()
    _enable(model)
    return model


def linear(*sizes: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)))


def gpt2(vocabulary: int, tied: bool = True) -> nn.Module:
    return language.gpt2(vocab_size=vocabulary, tie_word_embeddings=tied).train()


def eps(kind: Any = nn.LayerNorm, value: float = 1e-8) -> nn.Module:
    return with_norm(kind(16, eps=value))


#: the finding, the model, the plan, the device if that matters, the severity, and what stands in the text
SAID: list[tuple[str, Callable[[], nn.Module], Any, Device | None, str, tuple[str, ...]]] = [
    *((MASTERS, half, plan, None, "warning",
       ("[0.weight]", "4 trained weights in bf16", "2**-8", "dtype=torch.float32"))
      for plan in ("bf16-mixed", "16-mixed", "32-true")),
    *((MASTERS, half, Plan(mode), None, "info", ("at twice the memory",)) for mode in ("bf16-mixed", "32-true")),
    (MASTERS, net, "bf16-true", None, "warning", ("in bf16 alone", "'bf16-mixed'")),
    (MASTERS, net, Plan("16-true"), None, "warning", ("in fp16 alone", "'16-mixed'")),
    ("eval_mode", parts_in_eval_mode, "32-true", None, "warning", (": 2, 3",)),
    ("use_cache_while_checkpointing", partial(checkpointed, hf.gpt2), "bf16-mixed", None, "warning",
     ("use_cache = False",)),
    ("use_cache_while_checkpointing", hf.llama, Plan("bf16-mixed", checkpointing="LlamaDecoderLayer"), None, "info",
     ()),
    *(("bf16_emulated", net, plan, device, severity, (device.name, instead))
      for plan in ("bf16-mixed", Plan("bf16-mixed"))
      for device, severity, instead in
      ((V100, "warning", "'16-mixed'"), (OLD, "error", "'16-mixed'"))),
    ("bf16_emulated", net, {"precision": "16-mixed", "pins": {"2": "bf16"}}, V100, "warning", ("bf16 pins on 2",)),
    *(("tf32_off", build, "32-true", A100, "info", ("EnableTF32()",)) for build in (net, hf.gpt2, Tagger)),
    ("tf32_off", net, Plan("32-true"), A100, "info", ("tf32='high'",)),
    ("tf32_off", net, {"precision": "bf16-mixed", "pins": {"2": "fp32"}}, A100, "info", ("[2]",)),
    ("dims_not_aligned", partial(gpt2, 50257), "bf16-mixed", None, "info",
     ("[lm_head]", "the vocabulary, 50257", "resize_token_embeddings(50264)")),
    ("dims_not_aligned", partial(gpt2, 101, tied=False), "bf16-mixed", None, "info", ("resize_token_embeddings(104)",)),
    ("dims_not_aligned", partial(linear, 30, 50, 7), Plan("16-mixed"), None, "info", ("0 (30 x 50), 1 (50 x 7)",)),
    ("dims_not_aligned", partial(linear, 32, 24, 32), fp8(small="convert"), None, "info", ("not multiples of 16",)),
    ("precision_refused", net, fp8(small="convert"), A100, "error", ("capability 8.9", "'bf16-mixed'")),
    *(("norm_in_half", build, plan, None, "warning", (kinds, "'fp32'"))
      for build, kinds in
      ((hf.gpt2, "5 norms (LayerNorm)"), (resnet, "5 norms (BatchNorm2d)"), (bert, "6 norms (LayerNorm)"))
      for plan in ("bf16-true", Plan("16-true"))),
    ("norm_in_half", lambda: with_norm(OwnNorm()), "bf16-true", None, "warning", ("OwnNorm",)),
    ("norm_in_half", hf.gpt2, {"precision": "16-mixed", "pins": {"h.0": "fp16"}}, None, "warning",
     ("2 norms", "a pin, has them there")),
    *(("eps_underflows", partial(eps, kind), "16-true", None, "warning", ("eps=1e-08 is 0 in fp16",))
      for kind in (nn.LayerNorm, nn.RMSNorm)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "build", "plan", "device", "severity", "parts"), SAID)
def test_what_is_said(name: str, build: Any, plan: Any, device: Any, severity: str, parts: tuple[str, ...]) -> None:
    finding = found(build(), plan, **({} if device is None else {"device": device}))[name]
    assert finding.severity == severity
    for part in parts:
        assert part in str(finding)


def frozen_half() -> nn.Module:
    model = net()
    model[0].bfloat16().requires_grad_(False)
    return model


def frozen_parts() -> nn.Module:
    model = resnet()
    model[2].eval().requires_grad_(False)
    model[1].eval()
    model[3].body[1].eval()
    assert isinstance(model[3], Residual)
    return model


FP32_PINS = {"precision": "bf16-true", "pins": {"Linear": "fp32"}}
#: what is not found in which model, under which plan, on which device; an empty name stands for all
UNSAID: list[tuple[str, Callable[[], nn.Module], Any, Device | None]] = [
    *(("", build, plan, None)
      for build in (net, frozen_half) for plan in ("bf16-mixed", "32-true", Plan("bf16-mixed"))),
    (MASTERS, net, FP32_PINS, None), (MASTERS, net, PINNED_BF16, None),
    ("bf16_emulated", net, "bf16-mixed", EMULATING_CPU),
    ("", frozen_parts, "32-true", None),
    *(("fp16_params_under_scaler", build, plan, None) for build, plan in (
        (net, "16-mixed"), (half, "16-mixed"), (partial(half, torch.half), "bf16-mixed"),
        (partial(half, torch.half), Plan("16-true")), (net, {"precision": "16-mixed", "pins": {"2": "fp16"}}))),
    ("bf16_emulated", net, {"precision": "16-mixed", "pins": {"2": "bf16"}}, A100),
    *(("", net, Plan("32-true", tf32=word), A100) for word in ("high", "medium", "highest")),
    ("", partial(gpt2, 104), "bf16-mixed", None),
    ("", partial(linear, 15, 17), "32-true", None),
    ("", partial(linear, 15, 17), {"precision": "bf16-mixed", "pins": {"0": "fp32"}}, None),
    ("", partial(linear, 32, 24, 32), "bf16-mixed", None),
    ("precision_refused", net, fp8(emulate=True, small="convert"), A100),
    ("precision_refused", net, fp8(small="convert"), H100),
    ("norm_in_half", lambda: with_norm(CastingNorm()), "bf16-true", None),
    ("norm_in_half", lambda: with_norm(OwnNorm()), "bf16-mixed", None),
    ("norm_in_half", hf.gpt2, {"precision": "bf16-true", "pins": {"LayerNorm": "fp32"}}, None),
    *(("eps_underflows", eps, plan, None)
      for plan in ("bf16-true", "16-mixed", {"precision": "16-true", "pins": {"LayerNorm": "fp32"}})),
    ("eps_underflows", partial(eps, value=1e-7), "16-true", None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "build", "plan", "device"), UNSAID)
def test_what_is_not_said(name: str, build: Any, plan: Any, device: Any) -> None:
    findings = found(build(), plan, **({} if device is None else {"device": device}))
    assert (name not in findings) if name else findings == {}


def test_tf32_that_is_on_is_healthy() -> None:
    enabled = {"callbacks": [callbacks.EnableTF32("high")]}
    assert found(net(), "32-true", None, enabled, device=A100) == {}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert found(net(), "32-true", device=A100) == {}
    finally:
        torch.set_float32_matmul_precision(before)


# ---------------------------------------------------------------------- and it is true


def test_a_stock_scaler_refuses_fp16_weights_a_plan_trains_them_and_the_doctor_knows() -> None:
    model, plan = Regression(lambda p: torch.optim.SGD(p, lr=1e-3)).half(), Plan("16-mixed")
    finding = found(model, "16-mixed")["fp16_params_under_scaler"]
    assert (finding.severity, finding.where) == ("error", "net.0.weight")
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        fit(model, plugins=[MixedPrecision("16-mixed", "cpu")])
    assert found(model, plan)["fp16_params_under_scaler"].severity == "info"
    model.losses.clear()
    fit(model, plugins=[plan])
    assert len(model.losses) == 8


def test_a_model_that_from_pretrained_returned_is_in_eval_mode(tmp_path: object) -> None:
    from transformers import GPT2LMHeadModel

    hf.gpt2(dropout=0.1).save_pretrained(str(tmp_path))
    loaded = GPT2LMHeadModel.from_pretrained(str(tmp_path))
    finding = found(Wrapped(loaded), Plan("bf16-mixed"))["eval_mode"]
    assert (finding.severity, finding.where) == ("warning", "model")
    assert finding.fix.startswith("call self.model.train() ")
    assert found(Wrapped(loaded.train()), Plan("bf16-mixed")) == {}
    assert found(loaded.eval(), Plan("bf16-mixed"))["eval_mode"].where is None  # the whole model has no name


# ---------------------------------------------------------------------- reentrant checkpointing

NAME, BLOCKS = "lora_checkpoint_no_input_grads", ("LlamaDecoderLayer", "GPT2Block")


def _enable(model: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)


def _wrap(model: nn.Module, how: CheckpointImpl) -> None:
    wrapper = partial(checkpoint_wrapper, checkpoint_impl=how)
    apply_activation_checkpointing(model, wrapper, lambda module: type(module).__name__ in BLOCKS)


def _lora(build: Any, *, reentrant: bool | None, input_gradients: bool = False) -> Any:
    model = build(lora=True)
    model.config.use_cache = False
    if reentrant is not None:
        _enable(model, use_reentrant=reentrant)
    for hooked in (model, model.base_model.model):
        hooked.disable_input_require_grads()
    if input_gradients:
        model.enable_input_require_grads()
    return model


def _gradients(model: nn.Module) -> int:
    """How many trained weights get a gradient."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True", UserWarning)
        loss = hf.loss_of(model, hf.tokens())
    if loss.requires_grad:
        loss.backward()
    return sum(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("build", [hf.llama, hf.gpt2])
@pytest.mark.parametrize(("reentrant", "input_gradients"), [(True, True), (True, False), (False, False)])
def test_lora_is_found_to_train_nothing_exactly_where_it_does(
    build: Any, reentrant: bool, input_gradients: bool
) -> None:
    model = _lora(build, reentrant=reentrant, input_gradients=input_gradients)
    findings = found(model, "bf16-mixed")
    assert bool(findings) == (_gradients(model) == 0) == (reentrant and not input_gradients)
    if findings:
        assert findings[NAME].severity == "error"
        for part in ("2 blocks", "backward raises", "enable_input_require_grads()"):
            assert part in str(findings[NAME])


@pytest.mark.parametrize("how", list(CheckpointImpl))
def test_torchs_wrapper_is_looked_through_as_well(how: CheckpointImpl) -> None:
    model = _lora(hf.llama, reentrant=None)
    _wrap(model, how)
    assert (NAME in found(model, "bf16-mixed")) == (_gradients(model) == 0) == (how is CheckpointImpl.REENTRANT)


def test_beside_torchs_reentrant_wrapper_a_cache_makes_gradients_wrong() -> None:
    plain, model = hf.llama(), hf.llama()
    _wrap(model, CheckpointImpl.REENTRANT)
    assert found(model, "32-true")["use_cache_while_checkpointing"].severity == "error"
    for each in (plain, model):
        each.get_input_embeddings().requires_grad_(True)
        hf.loss_of(each, hf.tokens()).backward()
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    assert not all(torch.allclose(one.grad, other.grad, atol=1e-6) for one, other in pairs)


@pytest.mark.parametrize("hook", ["configure_model", "setup"])
def test_a_pattern_for_modules_that_are_made_later_is_no_fault(hook: str) -> None:
    plan = Plan("bf16-mixed", pins={"late": "fp32"}, checkpointing="late")
    late = type("Late", (Wrapped,), {hook: lambda self, stage="fit": setattr(self, "late", nn.Linear(16, 16))})
    assert "precision_refused" not in found(late(net()), plan)
    assert (
        "matches no module"
        in found(Wrapped(net()), Plan("bf16-mixed", pins={"late": "fp32"}))["precision_refused"].what
    )
