"""FP8 in the audit: the products of a converted layer read fp8 in both passes, and one that does not is a deviation."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_mp.callbacks import PrecisionAudit
from support.fp8 import RECIPES, Language, plan, run

pytest.importorskip("torchao")
pytestmark = pytest.mark.usefixtures("own_folder")
CONVERTED = {f"blocks.{index}.{name}" for index in "01" for name in ("up", "down")}


class Planted(Language):
    """The first block's second layer is used without being called."""

    def __init__(self) -> None:
        super().__init__()
        down = self.blocks[0].down
        down.register_forward_hook(lambda module, args, output: nn.functional.linear(args[0], module.weight))


def audited(module: Any, recipe: str, **fields: Any) -> Any:
    watcher = PrecisionAudit()
    run(module, plan(recipe, **fields), callbacks=[watcher])
    return watcher


@pytest.mark.parametrize(
    ("recipe", "how"), [*((recipe, None) for recipe in RECIPES), ("rowwise", "full"), ("rowwise", "selective")]
)
def test_a_converted_layer_reads_fp8_and_the_others_bf16(recipe: str, how: Any) -> None:
    checkpointing = None if how is None else {"modules": "Block", "mode": how}
    watcher = audited(Language(), recipe, checkpointing=checkpointing)
    assert watcher.report.ok, watcher.report.to_markdown()
    rows = {row.module: row for row in watcher.rows}
    backward = {"bf16, fp8"} if recipe == "rowwise_gw_hp" else {"fp8"}  # the weights' gradients are bf16 products
    assert {rows[name].compute for name in CONVERTED} == backward
    assert {rows[name].declared for name in CONVERTED} == {"fp8"}
    assert (rows["lm_head"].declared, rows["lm_head"].compute) == ("bf16", "bf16")
    assert {rows[name].param for name in CONVERTED} == {rows[name].grad for name in CONVERTED} == {"fp32"}


def test_a_product_in_bf16_where_fp8_is_declared_is_a_deviation() -> None:
    with pytest.warns(UserWarning, match="PrecisionAudit"):
        watcher = audited(Planted(), "rowwise")
    wrong = [row.module for row in watcher.rows if not row.ok]
    assert wrong == ["blocks.0.down"]
    assert "did not run in FP8" in watcher.report.explanation()
