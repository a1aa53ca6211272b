"""Pins in a run: stored, computed, differentiated and optimized in their dtype, whatever anybody casts meanwhile."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_mp import MixedPrecisionPlan
from support.language import Language, llama, tokens
from support.models import Regression, batches, weights
from support.oracles import MODES, plan_for
from support.running import fit, trainer

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
COMPUTE = {"32-true": FP32, "bf16-mixed": BF16, "16-mixed": FP16, "bf16-true": BF16, "16-true": FP16}
STORED = {"32-true": FP32, "bf16-mixed": FP32, "16-mixed": FP32, "bf16-true": BF16, "16-true": FP16}
every_mode = pytest.mark.parametrize("mode", MODES)
lenient = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True)


class Observe(Callback):
    """Input, output, gradient and state dtypes of every leaf module, by its name."""

    def __init__(self) -> None:
        self.inputs: dict[str, torch.dtype] = {}
        self.outputs: dict[str, torch.dtype] = {}
        self.gradients: dict[str, torch.dtype] = {}
        self.state: dict[str, torch.dtype] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, module in pl_module.named_modules():
            if name and not any(True for _ in module.children()):
                module.register_forward_hook(partial(self._forward, name))

    def _forward(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.inputs[name], self.outputs[name] = inputs[0].dtype, output.dtype

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        self.gradients = {n: p.grad.dtype for n, p in pl_module.named_parameters() if p.grad is not None}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        names = {p: n for n, p in pl_module.named_parameters()}
        self.state = {names[p]: s["exp_avg"].dtype for p, s in trainer.optimizers[0].state.items()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@every_mode
def test_a_pinned_module_is_stored_run_and_optimized_in_its_dtype(mode: str, dtype: str) -> None:
    pinned = {"fp32": FP32, "bf16": BF16, "fp16": FP16}[dtype]
    module, seen = Regression(lenient), Observe()
    fit(module, plugins=[plan_for(mode, pins={"LayerNorm": dtype})], callbacks=[seen])
    expected = {name: pinned if name.startswith("net.1.") else STORED[mode] for name in weights(module)}
    assert {name: p.dtype for name, p in module.named_parameters()} == expected
    assert seen.gradients == expected
    assert seen.state == expected
    # It hands on its own dtype under the mixed modes (autocast casts what follows), what came in under the true ones.
    assert seen.outputs["net.0"] == COMPUTE[mode]
    assert seen.outputs["net.1"] == (pinned if mode.endswith("mixed") else COMPUTE[mode])
    assert seen.outputs["net.3"] == COMPUTE[mode]


CASTS: dict[str, Any] = {
    "half": (lambda module: module.half(), FP16),
    "bfloat16": (lambda module: module.bfloat16(), BF16),
    "double": (lambda module: module.double(), torch.float64),
    "to": (lambda module: module.to(FP16), FP16),
    "to device and dtype": (lambda module: module.to(device="cpu", dtype=BF16), BF16),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("mode", ["bf16-true", "16-true"])
def test_every_cast_of_the_model_leaves_pins_alone(mode: str, cast: str) -> None:
    """Complaint 4: HalfPrecision's own ``.to``, Fabric's, or a user's must not take a pin's dtype."""
    module = Regression(lenient)
    fit(module, plugins=[plan_for(mode, pins={"LayerNorm": "fp32"})])
    before = weights(module)
    apply, dtype = CASTS[cast]
    apply(module)
    after = weights(module)
    for name in after:
        assert after[name].dtype == (FP32 if name.startswith("net.1.") else dtype)
    for name in ("net.1.weight", "net.1.bias"):
        assert torch.equal(after[name], before[name])  # not through a narrower dtype and back


def test_a_later_plan_replaces_earlier_pins() -> None:
    module = Regression(lenient)
    fit(module, plugins=[plan_for("bf16-true", pins={"LayerNorm": "fp32"})])
    fit(module, plugins=[plan_for("bf16-true", pins={"net.3": "fp32"})])
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == FP32} == {"net.3.weight", "net.3.bias"}
    fit(module, plugins=[plan_for("32-true")])
    assert {p.dtype for p in module.parameters()} == {FP32}
    assert type(module.net[1]) is nn.LayerNorm


def test_a_shadowed_pin_warns() -> None:
    with pytest.warns(UserWarning, match=r"pin 'net.1' has no effect"):
        fit(Regression(), plugins=[plan_for("bf16-mixed", pins={"net": "fp32", "net.1": "bf16"})])


def _longspec(lora: bool) -> dict[str, str]:
    """Norms fp32, LoRA bf16, head and embeddings in the compute dtype."""
    return {"*norm*": "fp32", **({"lora_*": "bf16"} if lora else {}), "lm_head": "bf16", "embed_tokens": "bf16"}


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
def test_the_longspec_set_on_a_llama_with_lora(mode: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    module = Language(peft.get_peft_model(llama(), config))
    fit(module, data=tokens(), plugins=[MixedPrecisionPlan(mode, pins=_longspec(lora=True))])
    for name, parameter in module.named_parameters():
        if "norm" in name:
            assert parameter.dtype == FP32, name
        elif any(part in name for part in ("lora_", "lm_head", "embed_tokens")):
            assert parameter.dtype == BF16, name
        else:
            assert parameter.dtype == STORED[mode], name
    assert all(torch.isfinite(torch.tensor(module.losses)))


class Encoder(Regression):
    """Torch's encoder layer, which takes a fast path of its own in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.Unflatten(1, (1, 16)), layer, nn.Flatten(), nn.Linear(16, 1))

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)


@pytest.mark.parametrize("pins", [{"norms": "fp32"}, {"linear1": "fp32", "linear2": "fp32"}])
def test_an_encoder_layer_is_evaluated_through_its_pins(pins: dict[str, str]) -> None:
    before, module = torch.backends.mha.get_fastpath_enabled(), Encoder()
    runner = trainer(plugins=[plan_for("bf16-true", pins=pins)], limit_val_batches=1)
    runner.fit(module, batches(), batches())
    runner.validate(module, batches(), verbose=False)
    assert torch.backends.mha.get_fastpath_enabled() is before is True
