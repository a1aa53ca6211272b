"""Whether what was seen is what was declared: a table of sights and verdicts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import (
    DeepSpeedPrecision,
    DoublePrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    XLAPrecision,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_mp.precision_audit.judge import AS_STORED, Declaration, by_stock, differences
from lightning_mp.precision_audit.observer import Observed, Ran

MIXED = Declaration(
    by="a plan", storage="fp32", compute="bf16", reduce="fp32", state=AS_STORED, autocast=True, frozen=True
)
FP32 = replace(MIXED, compute="fp32", autocast=False)
HALF = replace(MIXED, storage="bf16", autocast=False)
PINNED = replace(MIXED, pins={"m": "fp32"})
HALF_PINNED = replace(HALF, pins={"m": "fp32"})
TF32, NO_TF32 = replace(FP32, tf32=True), replace(FP32, tf32=False)
STOCK = replace(MIXED, frozen=False, reduce=AS_STORED)
#: FSDP1's param_dtype: everything is gathered in half precision, norms included
GATHERED = replace(MIXED, autocast=False)
NOTHING = Declaration(by="nothing")


def ran(kind: Any, *dtypes: str, weighted: bool = False) -> dict[str, Any]:
    return {"ran": {Ran(kind, dtypes, weighted)}}


#: declaration, what was seen, the columns that differ
JUDGED: list[tuple[Declaration, dict[str, Any], str]] = [
    # products
    (MIXED, ran("product", "bf16"), ""),
    (MIXED, ran("product", "fp32"), "compute"),
    (MIXED, ran("product", "tf32"), "compute"),
    (MIXED, {"ran": {Ran("product", ("bf16",)), Ran("product", ("fp32",))}}, "compute"),
    (FP32, ran("product", "fp32"), ""),
    (FP32, ran("product", "tf32"), ""),  # torch's switches were left alone
    (TF32, ran("product", "tf32"), ""),
    (TF32, ran("product", "fp32"), "compute"),
    (NO_TF32, ran("product", "tf32"), "compute"),
    (HALF, ran("product", "fp32"), "compute"),
    (PINNED, ran("product", "tf32"), ""),
    (PINNED, ran("product", "bf16"), "compute"),
    # a pin that sums in fp32: where no kernel takes the half operands, they are multiplied in fp32
    (replace(FP32, products={"m": "bf16"}), ran("product", "bf16"), ""),
    (replace(MIXED, products={"m": "bf16"}), ran("product", "fp32"), ""),
    (replace(MIXED, products={"m": "bf16"}), ran("product", "fp16"), "compute"),
    # attention that widens by itself
    (MIXED, {**ran("product", "fp32"), "attends": True}, ""),
    (MIXED, {**ran("product", "fp16"), "attends": True}, "compute"),
    # norms
    (MIXED, ran("norm", "fp32", weighted=True), ""),
    (MIXED, ran("norm", "bf16", weighted=True), "compute"),
    (MIXED, ran("norm", "bf16"), ""),  # without weights: on the CPU autocast leaves it alone
    (HALF, ran("norm", "bf16", weighted=True), ""),
    (PINNED, ran("norm", "bf16", "fp32", weighted=True), "compute"),
    (GATHERED, ran("norm", "bf16", weighted=True), ""),
    # norms written out
    (MIXED, {**ran("statistic", "fp32"), "class_name": "LlamaRMSNorm"}, ""),
    (MIXED, {**ran("statistic", "bf16"), "class_name": "LlamaRMSNorm"}, "compute"),
    (MIXED, {**ran("statistic", "bf16"), "class_name": "Pool"}, ""),
    (MIXED, {**ran("pointwise", "bf16"), "class_name": "LlamaRMSNorm"}, ""),
    # look-ups
    (MIXED, ran("lookup", "fp32"), ""),
    (MIXED, ran("lookup", "bf16"), "compute"),
    (GATHERED, ran("lookup", "bf16"), ""),
    # elementwise
    (MIXED, ran("pointwise", "fp32"), ""),
    (MIXED, ran("pointwise", "fp16"), "compute"),
    (HALF, ran("pointwise", "fp32"), ""),
    (PINNED, ran("pointwise", "bf16"), "compute"),
    (replace(MIXED, compute="fp16", pins={"other": "bf16"}), ran("pointwise", "bf16"), ""),
    # what is stored
    (MIXED, {"trained": {"fp32"}}, ""),
    (MIXED, {"trained": {"bf16"}}, "param"),
    (MIXED, {"frozen": {"bf16"}}, "param"),
    (STOCK, {"frozen": {"bf16"}}, ""),
    (MIXED, {"special": {"int8"}}, ""),
    (HALF_PINNED, {"trained": {"fp32"}}, ""),
    # what follows from it
    (MIXED, {"trained": {"bf16"}, "grad": {"bf16"}, "state": {"bf16"}}, "param"),
    (MIXED, {"trained": {"fp32"}, "grad": {"fp32"}, "state": {"bf16"}}, "optimizer_state"),
    (MIXED, {"trained": {"fp32"}, "state": {"bf16", "fp32"}}, "optimizer_state"),
    (HALF, {"trained": {"bf16"}, "state": {"fp32"}}, "optimizer_state"),
    (replace(HALF, state="fp32"), {"trained": {"bf16"}, "state": {"fp32"}}, ""),
    (replace(HALF, state=None), {"trained": {"bf16"}, "state": {"fp32"}}, ""),
    # what is summed
    (MIXED, {"trained": {"fp32"}, "reduce": {"fp16"}}, "reduce"),
    (HALF, {"trained": {"bf16"}, "reduce": {"bf16"}}, "reduce"),
    (replace(HALF, reduce=AS_STORED), {"trained": {"bf16"}, "reduce": {"bf16"}}, ""),
    (replace(HALF, reduce=None), {"trained": {"bf16"}, "reduce": {"bf16"}}, ""),
    # nothing seen, nothing declared
    (MIXED, {}, ""),
    (NOTHING, {**ran("product", "fp16"), "trained": {"bf16"}, "state": {"fp32"}, "reduce": {"fp16"}}, ""),
    (replace(NOTHING, pins={"m": "fp32"}), {"trained": {"bf16"}}, "param"),
    # several at once
    (MIXED, {**ran("product", "fp32"), "trained": {"fp32"}, "state": {"bf16"}}, "compute optimizer_state"),
]


@pytest.mark.parametrize(("declaration", "seen", "wanted"), JUDGED)
def test_verdicts(declaration: Declaration, seen: dict[str, Any], wanted: str) -> None:
    found = list(differences("m", Observed(**{"class_name": "Linear", **seen}), declaration))
    assert [difference.what for difference in found] == wanted.split()
    assert all(difference.found and difference.reason and difference.fix for difference in found)


CPU = torch.device("cpu")
ONE = SingleDeviceStrategy(CPU)


def _modules(root: nn.Module) -> dict[str, nn.Module]:
    return dict(root.named_modules())


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


#: plugin → storage, compute, autocast, optimizer state, frozen parameters too
PLUGINS: list[tuple[Precision, tuple[Any, ...]]] = [
    (Precision(), ("fp32", "fp32", False, AS_STORED, False)),
    (DoublePrecision(), ("fp64", "fp64", False, AS_STORED, False)),
    (MixedPrecision("bf16-mixed", "cpu"), ("fp32", "bf16", True, AS_STORED, False)),
    (MixedPrecision("16-mixed", "cpu"), ("fp32", "fp16", True, AS_STORED, False)),
    (HalfPrecision("bf16-true"), ("bf16", "bf16", False, AS_STORED, True)),
    (HalfPrecision("16-true"), ("fp16", "fp16", False, AS_STORED, True)),
]


@pytest.mark.parametrize(("plugin", "wanted"), PLUGINS, ids=[f"{type(p).__name__}-{p.precision}" for p, _ in PLUGINS])
def test_a_stock_plugin(plugin: Precision, wanted: tuple[Any, ...]) -> None:
    found = by_stock(plugin, ONE, _modules(_net()))
    assert (found.storage, found.compute, found.autocast, found.state, found.frozen) == wanted
    assert found.by == f"{type(plugin).__name__}({plugin.precision!r})"


@pytest.mark.parametrize(
    ("strategy", "reduce"),
    [
        (ONE, AS_STORED),
        (DDPStrategy(), AS_STORED),
        (DDPStrategy(ddp_comm_hook=fp16_compress_hook), None),  # the user's hook decides
        (ModelParallelStrategy(), None),  # the user's fully_shard does
    ],
)
def test_what_stock_strategies_sum_in(strategy: Any, reduce: str | None) -> None:
    assert by_stock(HalfPrecision("bf16-true"), strategy, _modules(_net())).reduce == reduce


def test_a_plugin_nobody_here_knows_declares_nothing() -> None:
    class Own(Precision):
        precision: Any = "bf16-true"

    unknown = Own(), XLAPrecision.__new__(XLAPrecision), FSDPPrecision("bf16-mixed"), DeepSpeedPrecision("bf16-mixed")
    for plugin in unknown:
        found = by_stock(plugin, ONE, _modules(_net()))
        assert (found.storage, found.compute, found.declared("0")) == (None, None, None)
        assert "not judged" in found.notes[0]
