"""A pinned weight that something computes with outside of its module's forward: found before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from lightning_mp import MixedPrecisionPlan, PlanError
from support.models import FEATURES, Regression
from support.norms import host
from support.oracles import plan_for
from support.running import fit
from support.sharded import refused


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


READS: dict[str, Callable[[Tensor, nn.Linear], Tensor]] = {
    "linear": lambda h, inner: F.linear(h, inner.weight),
    "transposed": lambda h, inner: h @ inner.weight.t(),
    "a row": lambda h, inner: h[:, :1] @ inner.weight[1:2],
    "penalty": lambda h, inner: h + inner.weight.pow(2).sum(),
    "cast": lambda h, inner: F.linear(h.bfloat16(), inner.weight.bfloat16()).to(h.dtype),
    "dtype": lambda h, inner: h.to(inner.weight.dtype).to(h.dtype),
    "attention": lambda h, inner: h,
}
WRONG = ("linear", "transposed", "a row")


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
    assert ("inner.weight" in said) == (not moved) == (read in WRONG)


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
