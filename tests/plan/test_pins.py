"""Pins in a run: they stay in their dtype, and a product of a pinned weight outside of its forward is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_mp import MixedPrecisionPlan, PlanError
from support.models import FEATURES, Regression, batches, weights
from support.norms import host
from support.oracles import plan_for
from support.running import fit, trainer
from support.sharded import refused

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
lenient = partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True)


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


class Head(nn.Linear):
    """Remembers the dtypes of its input and weight."""

    met: Any = None

    def forward(self, input: Tensor) -> Tensor:
        self.met = input.dtype, self.weight.dtype
        return super().forward(input)


class Replaces(Regression):
    """Begins its second epoch with another last layer, or with another net around it."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.whole = whole

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            head = Head(*self.net[3].weight.shape[::-1])
            self.net[3] = head
            if self.whole:
                self.net = nn.Sequential(*self.net)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
def test_a_module_that_is_replaced_in_a_run_is_pinned_again(whole: bool, mode: str) -> None:
    module = Replaces(whole)
    fit(module, plugins=[plan_for(mode, pins={"net.3": "fp32"})], max_epochs=2)
    assert module.net[3].met == (FP32, FP32)
    assert module.net[3].bfloat16().weight.dtype == FP32


class Reader(Regression):
    """Does something with the weight of its second layer beside calling it."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.inner, self.read = nn.Linear(FEATURES, FEATURES), read
        self.att = nn.MultiheadAttention(FEATURES, 2, batch_first=True)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.inner(x)
        if self.read == "attention":
            hidden = self.att(hidden[:, None], hidden[:, None], hidden[:, None])[0][:, 0]
        return (self.net(READS[self.read](hidden, self.inner)).float() - y.float()).pow(2).mean()


def _attention(h: Tensor, inner: nn.Linear) -> Tensor:
    """As WavLM does it: the projections are modules, and torch's function is given their weights."""
    x, w, b = h[:, None], inner.weight, inner.bias
    bias, out = torch.cat([b, b, b]), (torch.eye(FEATURES, dtype=h.dtype), None)
    weights = {"use_separate_proj_weight": True, "q_proj_weight": w, "k_proj_weight": w, "v_proj_weight": w}
    return F.multi_head_attention_forward(x, x, x, FEATURES, 2, None, bias, None, None, False, 0.0, *out, **weights)[0][
        :, 0
    ]


READS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "linear": lambda h, inner: F.linear(h, inner.weight),
    "transposed": lambda h, inner: h @ inner.weight.t(),
    "a row": lambda h, inner: h[:, :1] @ inner.weight[1:2],
    "a clone": lambda h, inner: h @ inner.weight.clone(),
    "two of them": lambda h, inner: F.linear(h, torch.cat([inner.weight, inner.weight]))[:, :FEATURES],
    "on the left": lambda h, inner: torch.mm(inner.weight, h.t()).t(),
    "linalg": lambda h, inner: torch.linalg.matmul(h, inner.weight),
    "einsum": lambda h, inner: torch.einsum("bi,oi->bo", h, inner.weight),
    "batched": lambda h, inner: torch.baddbmm(h[:, None], h[:, None], inner.weight.expand(len(h), -1, -1))[:, 0],
    "convolution": lambda h, inner: F.conv1d(h[..., None], inner.weight[..., None])[..., 0],
    "WavLM": _attention,
    "penalty": lambda h, inner: h + inner.weight.pow(2).sum(),
    "cast": lambda h, inner: F.linear(h.bfloat16(), inner.weight.bfloat16()).to(h.dtype),
    "dtype": lambda h, inner: h.to(inner.weight.dtype).to(h.dtype),
    "attention": lambda h, inner: h,
    "called again": lambda h, inner: inner(h),
}
WRONG = tuple(READS)[:11]


def _said(read: str, mode: str, name: str = "single", pin: str = "inner", **options: Any) -> tuple[str, bool]:
    """What the plan said, and whether weights moved."""
    module = Reader(read)
    before = module.inner.weight.detach().clone()
    plan = plan_for(mode, pins={pin: "fp32"}, **options)
    said = refused(lambda: fit(module, max_steps=2, **host(name, plan)))
    moved = said == "not refused" or (name == "single" and not torch.equal(before, module.inner.weight.detach()))
    return said, moved


@pytest.mark.parametrize("mode", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("read", READS)
def test_a_product_outside_of_the_pinned_forward_is_refused(read: str, mode: str) -> None:
    said, moved = _said(read, mode)
    assert bool(re.search(r"inner\.\w+ is pinned to fp32 \('inner'\)", said)) == (not moved) == (read in WRONG)


class Validates(Reader):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.linear(batch[0], self.inner.weight).mean()


def test_the_sanity_check_is_watched_too() -> None:
    runner = trainer(plugins=[plan_for("bf16-mixed", pins={"inner": "fp32"})], num_sanity_val_steps=1, max_steps=1)
    with pytest.raises(PlanError, match=r"inner\.weight is pinned"):
        runner.fit(Validates("called again"), batches(), batches())
    assert runner.global_step == 0


@pytest.mark.parametrize("checkpointing", [None, "net"])
def test_in_fp32_and_for_a_pin_to_what_is_computed_nothing_deviates(checkpointing: Any) -> None:
    assert _said("linear", "32-true", checkpointing=checkpointing)[0] == "not refused"
    plan = MixedPrecisionPlan("bf16-mixed", pins={"inner": "bf16"}, checkpointing=checkpointing)
    fit(Reader("linear"), max_steps=1, plugins=[plan])


@pytest.mark.parametrize(
    ("pins", "faults"),
    [
        ({"*out_proj*": "fp32"}, 1),
        ({"att": "fp32"}, 0),
        ({"*out_proj*": "bf16", "att": "fp32"}, 1),
        ({"*out_proj*": "bf16"}, 0),
    ],
)
def test_attention_reads_its_projection(pins: Any, faults: int) -> None:
    plan = MixedPrecisionPlan("bf16-mixed", pins=pins)
    if not faults:
        fit(Reader("attention"), max_steps=1, plugins=[plan])
        return
    with pytest.raises(PlanError, match=r"pins=\{'att'") as refusal:
        plan.apply(Reader("attention"))
    assert len(refusal.value.faults) == faults
