"""The plan's table, with how many modules of a model each rule covers, and the lines a run begins with."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_mp import Checkpointing, MixedPrecisionPlan, PrecisionPolicy
from lightning_mp.plan import describe
from lightning_mp.policy import PRECISIONS


class Block(nn.Module):
    """A norm and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(self.norm(batch))


def model() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.Sequential(Block(), Block(), Block()), "norm": nn.LayerNorm(4)})


PLAN = MixedPrecisionPlan(
    "16-mixed", pins={"*norm*": "fp32", "nothing": "bf16"}, checkpointing=Checkpointing(modules="Block", every=2)
)


def test_every_rule_says_what_it_covers() -> None:
    table = dict(line.split(maxsplit=1) for line in PLAN.describe(model()).splitlines() if not line.startswith(" "))
    assert table["checkpointing"] == "Checkpointing(modules='Block', every=2): 2 modules, blocks.0, blocks.2"
    assert "pin            '*norm*' fp32: 4 modules, blocks.*.norm, norm" in PLAN.describe(model())
    assert "pin            'nothing' bf16: no module" in PLAN.describe(model())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_table_says_what_is_stored_and_computed(precision: str) -> None:
    policy = PrecisionPolicy(precision=precision)
    text = MixedPrecisionPlan(precision).describe()
    assert f"precision      {precision}" in text
    assert max(map(len, text.splitlines())) <= describe.WIDTH
    if precision != "auto":
        products = "matrix products and convolutions" if policy.mixed else "everything"
        assert f"optimizer state {policy.storage_dtype}" in text
        assert f"computed       {products} {policy.compute_dtype}" in text


def test_a_notebook_shows_the_table_escaped() -> None:
    html = MixedPrecisionPlan(pins={"<b>": "fp32"})._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;" in html


@pytest.mark.parametrize("plan", [MixedPrecisionPlan(), PLAN, MixedPrecisionPlan(pins={"x" * 300: "fp32"})])
def test_a_run_begins_with_three_to_five_short_lines(plan: MixedPrecisionPlan) -> None:
    lines = describe.announcement(plan.policy, model())
    assert 3 <= len(lines) <= 5
    assert all(len(line) <= 160 for line in lines)
    assert lines[0].startswith("MixedPrecisionPlan(")
