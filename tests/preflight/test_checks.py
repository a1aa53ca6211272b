"""What the doctor says of a model, its device and its run; what can be run to see whether it is true is run."""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from lightning_mp import FP8, LossScaling, MixedPrecisionPlan, callbacks, make_strategy
from lightning_mp.policy.hardware import Device
from lightning_mp.preflight.doctor import doctor
from lightning_mp.record.findings import Finding
from support import hf, language
from support.doctor import A100, CPU, OLD, V100, Residual, Tagger, Wrapped, bert, found, net, resnet
from support.models import Regression
from support.running import fit

Plan = MixedPrecisionPlan
H100 = Device("cuda", "NVIDIA H100", (9, 0))
EMULATING_CPU = Device("cpu", "CPU", bf16="emulated")
MASTERS, PINNED_BF16 = "no_fp32_masters", {"precision": "bf16-mixed", "pins": {"2": "bf16"}}


def fp8(**fields: object) -> MixedPrecisionPlan:
    return Plan("fp8-mixed", fp8=FP8(**fields))  # type: ignore[arg-type]


def half(dtype: torch.dtype = torch.bfloat16, *layers: int) -> nn.Sequential:
    model = net()
    for layer in layers or (0, 2):
        model[layer].to(dtype)
    return model


def with_norm(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), norm)


class OwnNorm(nn.Module):
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


def scaled(mode: str = "16-mixed", **scaling: Any) -> MixedPrecisionPlan:
    return Plan(mode, loss_scaling=LossScaling(**scaling))


def trained(make: Any = AdamW, **options: Any) -> Any:
    return lambda: Wrapped(net(), partial(make, lr=1e-3, **options))


STATIC = {"dynamic": False, "min_scale": 0.0}
#: of the run: the finding, the plan, the micro-batches, the severity, where it is, what stands in the text
RUN_SAID: list[tuple[str, Any, int, str, str, str]] = [
    *(("scale_overflows_at_once", scaled(mode, **scaling), 1, severity, "loss_scaling.init_scale", said)
      for mode in ("16-mixed", "16-true")
      for scaling, severity, said in (
        ({"init_scale": 2.0**32}, "warning", "each halving costs a step"),
        ({"init_scale": 2.0**25}, "warning", "a gradient of 0.002 overflows"),
        ({"init_scale": 2.0**32, **STATIC}, "error", "skipped forever"),
        ({"init_scale": 2.0**42, "min_scale": 2.0**41}, "error", "skipped forever"))),
    *(("accumulation_overflows", plan, parts, "warning", "accumulate_grad_batches", said)
      for plan, parts, said in ((scaled("16-true"), 8, "1 or more"),
                                (scaled("16-true", init_scale=2.0**20), 4, "0.0625 or more"))),
    *(("eps_underflows", plan, 1, "error", "configure_optimizers", "AdamW(eps=1e-08)")
      for plan in ("16-true", Plan("16-true"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "build", "plan", "device", "severity", "parts"), SAID)
def test_what_is_said(name: str, build: Any, plan: Any, device: Any, severity: str, parts: tuple[str, ...]) -> None:
    finding = found(build(), plan, **({} if device is None else {"device": device}))[name]
    assert finding.severity == severity
    for part in parts:
        assert part in str(finding)


@pytest.mark.parametrize(("name", "plan", "batches", "severity", "where", "said"), RUN_SAID)
def test_what_is_said_of_the_run(name: str, plan: Any, batches: int, severity: str, where: str, said: str) -> None:
    finding = found(trained()(), plan, None, {"accumulate_grad_batches": batches})[name]
    assert (finding.severity, finding.where) == (severity, where)
    assert said in str(finding)


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


FP32_STORED = {"precision": "16-true", "pins": {"Linear": "fp32"}}
SCHEDULES = {
    "OneCycleLR": partial(OneCycleLR, max_lr=1e-2, total_steps=9),
    "LambdaLR": partial(LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
}
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
    *(("", net, scaled(**scaling), None)
      for scaling in ({}, {"init_scale": 2.0**24}, {"init_scale": 2.0**15, "dynamic": False})),
    ("", net, "16-mixed", None),
    *(("eps_underflows", build, plan, None) for build, plan in (
        (trained(eps=1e-4), "16-true"), (trained(fused=True), "16-true"), (trained(SGD), "16-true"),
        (trained(), "16-mixed"), (trained(), "bf16-true"), (trained(), FP32_STORED))),
    *(("", lambda: Regression(scheduler=SCHEDULES["LambdaLR"]), plan, None)
      for plan in ("bf16-mixed", "32-true", Plan("16-mixed"))),
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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True", UserWarning)
        loss = hf.loss_of(model, hf.tokens())
    if loss.requires_grad:
        loss.backward()
    return sum(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("build", [hf.llama, hf.gpt2])
@pytest.mark.parametrize(("reentrant", "input_gradients"), [(True, True), (True, False), (False, False)])
def test_lora_is_found_to_train_nothing_where_it_does(build: Any, reentrant: bool, input_gradients: bool) -> None:
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


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stock_scaler_skips_and_the_schedule_counts_it(name: str) -> None:
    finding = found(Regression(scheduler=SCHEDULES[name]), "16-mixed")["schedule_counts_skips"]
    assert finding.severity == "warning"
    assert finding.what.startswith(name)
    assert "MixedPrecisionPlan('16-mixed')" in finding.fix


def _dict(optimizer: Any, interval: str) -> dict[str, Any]:
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": SCHEDULES["LambdaLR"](optimizer), "interval": interval},
    }


def _every_shape(parameters: Any) -> dict[str, tuple[Any, bool]]:
    """What Lightning takes from ``configure_optimizers``, and whether a schedule in it goes by steps."""
    sgd = SGD(parameters, lr=1.0)
    plain = SCHEDULES["LambdaLR"](sgd)
    return {
        "an optimizer": (sgd, False),
        "a list": ([sgd], False),
        "two lists": (([sgd], [plain]), False),
        "two lists, a dict": (([sgd], [{"scheduler": plain, "interval": "step"}]), True),
        "a dict": (_dict(sgd, "step"), True),
        "a dict by epoch": (_dict(sgd, "epoch"), False),
        "a tuple of dicts": ((_dict(sgd, "epoch"), _dict(sgd, "step")), True),
        "nothing": (None, False),
    }


@pytest.mark.parametrize("shape", list(_every_shape(net().parameters())))
def test_whatever_lightning_takes_is_read(shape: str) -> None:
    model = Wrapped(net(), lambda p: _every_shape(p)[shape][0])
    counts = _every_shape(net().parameters())[shape][1]
    assert ("schedule_counts_skips" in found(model, "16-mixed")) == counts


class NeedsTrainer(Regression):
    """As many do."""

    def configure_optimizers(self) -> Any:
        total = self.trainer.estimated_stepping_batches
        return SGD(self.parameters(), lr=1 / total)


def test_what_needs_a_trainer_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_mp.preflight.fit_checks"):
        assert found(NeedsTrainer(), "16-mixed") == {}
    assert "schedule_counts_skips could not be made" in caplog.text


HALF = {"fp16": {"enabled": True}}


def _found(plan: Any, strategy: Callable[[], Any], trainer: Any = None) -> list[Finding]:
    pytest.importorskip("deepspeed")
    findings = doctor(net(), plan, strategy(), trainer, device=CPU)
    return [finding for finding in findings if finding.name == "deepspeed_contradicts_trainer"]


def _ours(config: Any) -> Callable[[], Any]:
    return lambda: make_strategy("deepspeed_zero2", Plan("bf16-mixed"), config=config)


@pytest.mark.parametrize(
    ("config", "trainer", "both"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 2}, ("steps=4", "accumulate_grad_batches=2")),
        ({"gradient_accumulation_steps": 4}, {"devices": 2}, ("steps=4", "accumulate_grad_batches=1")),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 0.5}, ("clipping=1.0", "gradient_clip_val=0.5")),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4},
            {"devices": 8, "accumulate_grad_batches": 4},
            ("train_batch_size=64", "= 128"),
        ),
    ],
)
def test_json_and_trainer_disagree(config: Any, trainer: Any, both: tuple[str, str]) -> None:
    (finding,) = _found(Plan("bf16-mixed"), _ours(config), trainer)
    assert finding.severity == "error"
    assert all(value in finding.what for value in both)
    assert finding.where == next(iter(config))


def test_json_and_plan_disagree() -> None:
    findings = _found(Plan("bf16-mixed"), lambda: {**HALF, "zero_optimization": {"stage": 2}})
    assert [finding.where for finding in findings] == ["fp16.enabled"]
    assert "precision='bf16-mixed'" in findings[0].what


@pytest.mark.parametrize(
    ("config", "trainer"),
    [
        ({"gradient_accumulation_steps": 4}, {"accumulate_grad_batches": 4}),
        ({"gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}, {"accumulate_grad_batches": 4}),
        ({"gradient_clipping": 1.0}, {"gradient_clip_val": 1.0}),
        ({"gradient_clipping": 1.0}, {"accumulate_grad_batches": 2}),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, {"accumulate_grad_batches": 4}),
        ({"gradient_accumulation_steps": 4}, None),
        ({}, {"accumulate_grad_batches": 4}),
    ],
)
def test_what_agrees_or_cannot_be_known_is_healthy(config: Any, trainer: Any) -> None:
    assert _found(Plan("bf16-mixed"), _ours(config), trainer) == []


@pytest.mark.parametrize("strategy", [None, "auto", "ddp", "mp_deepspeed_zero2", DeepSpeedStrategy])
def test_without_a_json_there_is_nothing_to_contradict(strategy: Any) -> None:
    made = strategy if callable(strategy) else lambda: strategy
    assert _found("bf16-mixed", made, {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0}) == []


@pytest.mark.parametrize("plan", [Plan("bf16-mixed"), "bf16-mixed", "32-true"], ids=str)
@pytest.mark.parametrize("key", [None, "plugins", "precision"])
def test_another_precision_in_the_json_of_lightnings_own_strategy(plan: Any, key: str | None) -> None:
    """It refuses a plan; of its own precisions it sets the block beside the other one, or leaves that alone."""
    if (key == "plugins") == isinstance(plan, str) and key is not None:
        return
    findings = _found(plan if key is None else None, lambda: DeepSpeedStrategy(config=HALF), key and {key: plan})
    assert [(finding.severity, finding.where) for finding in findings] == [("error", "fp16.enabled")]
    assert f"precision={getattr(plan, 'precision', plan)!r}" in findings[0].what
