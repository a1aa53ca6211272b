"""The callbacks that act: TF32, pins and checkpointing beside Lightning's own plugins."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD

from lightning_mp import PlanError
from lightning_mp.callbacks import ActivationCheckpointing, DtypePinning, EnableTF32
from support.language import Language, gpt2, tokens
from support.models import Regression, same_weights, weights
from support.oracles import plan_for, stock_for
from support.running import fit
from support.traces import Trace


def test_the_default_turns_tf32_on() -> None:
    assert EnableTF32().setting == "high"


FP32 = torch.float32
STORED = {"32-true": FP32, "bf16-mixed": FP32, "16-mixed": FP32, "bf16-true": torch.bfloat16, "16-true": torch.float16}
sgd = partial(SGD, lr=1e-3)


class Watches(Callback):
    """The stored dtypes and the norm's output dtype while training."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[1].register_forward_hook(lambda module, inputs, output: setattr(self, "output", output.dtype))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.stored = {name: p.dtype for name, p in pl_module.named_parameters()}


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [(m, d) for m in STORED for d in ("fp32", "bf16", "fp16") if (m, d) != ("16-mixed", "fp16")],
)
def test_pins_hold_under_every_stock_plugin(mode: str, dtype: str) -> None:
    """Complaint 4 and HalfPrecision: its ``.to`` comes after the callback's setup and must not overwrite the pin."""
    pinned = {"fp32": FP32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    looks = Watches()
    fit(Regression(sgd), callbacks=[DtypePinning({"LayerNorm": dtype}), looks], **stock_for(mode))
    expected = {name: pinned if "net.1." in name else STORED[mode] for name in looks.stored}
    assert looks.stored == expected
    other_half = (mode, dtype) in (("bf16-mixed", "fp16"), ("16-mixed", "bf16"))
    assert looks.output == (FP32 if other_half else pinned if mode.endswith("mixed") else STORED[mode])


def test_an_fp16_pin_under_stock_16_mixed_is_refused_before_the_first_step() -> None:
    """Complaint 5 (PL 5140): torch's GradScaler stops at the first step, "Attempting to unscale FP16 gradients"."""
    module = Regression(sgd)
    with pytest.raises(PlanError, match="fp16"):
        fit(module, callbacks=[DtypePinning({"LayerNorm": "fp16"})], **stock_for("16-mixed"))
    assert module.losses == []


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_it_trains_what_the_plan_with_these_pins_trains(mode: str) -> None:
    stock, ours, there, here = Regression(sgd), Regression(sgd), Trace(), Trace()
    fit(stock, callbacks=[DtypePinning({"LayerNorm": "fp32", "net.3": "bf16"}), there], **stock_for(mode))
    fit(ours, callbacks=[here], plugins=[plan_for(mode, pins={"LayerNorm": "fp32", "net.3": "bf16"})])
    assert stock.losses == ours.losses
    assert all(same_weights(a, b) for a, b in zip(there.weights, here.weights, strict=True))


def test_dtypes_come_back_and_keep_what_was_trained() -> None:
    module, trace = Regression(sgd), Trace()
    fit(module, precision="32-true", callbacks=[DtypePinning({"net.3": "bf16"}), trace])
    assert {p.dtype for p in module.parameters()} == {FP32}
    last = trace.weights[-1]
    assert last["net.3.weight"].dtype == torch.bfloat16
    assert all(torch.equal(weight, last[name].float()) for name, weight in weights(module).items())


pytest.importorskip("transformers")


class Held(Language):
    """Counts the bytes the forward keeps for the backward."""

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


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(PlanError, match="'GPT2Block'"):
        fit(Language(gpt2()), data=tokens(), callbacks=[ActivationCheckpointing("GPT2Blok")])
