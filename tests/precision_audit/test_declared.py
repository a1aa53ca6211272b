"""What a plan, and each of Lightning's own plugins, declares."""

from __future__ import annotations

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
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import MixedPrecision as MixedPrecisionOfFSDP

from lightning_mp import PrecisionPolicy
from lightning_mp.precision_audit.judge import AS_STORED, by_policy, by_stock

CPU = torch.device("cpu")
ONE = SingleDeviceStrategy(CPU)


def _modules(root: nn.Module) -> dict[str, nn.Module]:
    return dict(root.named_modules())


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


#: precision → storage, compute, autocast
MODES = {
    "32-true": ("fp32", "fp32", False),
    "bf16-mixed": ("fp32", "bf16", True),
    "16-mixed": ("fp32", "fp16", True),
    "bf16-true": ("bf16", "bf16", False),
    "16-true": ("fp16", "fp16", False),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_plan(mode: Any) -> None:
    found = by_policy(PrecisionPolicy(precision=mode), _modules(_net()), CPU)
    assert (found.storage, found.compute, found.autocast) == MODES[mode]
    assert (found.reduce, found.state, found.frozen) == ("fp32", AS_STORED, True)
    assert found.by == f"MixedPrecisionPlan({mode!r})"


@pytest.mark.parametrize("setting", ["high", "highest", "medium"])
def test_tf32_where_there_is_none(setting: str) -> None:
    found = by_policy(PrecisionPolicy(precision="32-true", tf32=setting), _modules(_net()), CPU)
    assert (found.declared("0"), found.tf32) == ("fp32", None)
    assert found.notes == (f"tf32={setting!r} changes nothing on CPU: it has no TF32",)


#: plugin → storage, compute, autocast, optimizer state, frozen parameters too
STOCK: list[tuple[Precision, tuple[Any, ...]]] = [
    (Precision(), ("fp32", "fp32", False, AS_STORED, False)),
    (DoublePrecision(), ("fp64", "fp64", False, AS_STORED, False)),
    (MixedPrecision("bf16-mixed", "cpu"), ("fp32", "bf16", True, AS_STORED, False)),
    (MixedPrecision("16-mixed", "cpu"), ("fp32", "fp16", True, AS_STORED, False)),
    (HalfPrecision("bf16-true"), ("bf16", "bf16", False, AS_STORED, True)),
    (HalfPrecision("16-true"), ("fp16", "fp16", False, AS_STORED, True)),
    (DeepSpeedPrecision("32-true"), ("fp32", "fp32", False, "fp32", True)),
    (DeepSpeedPrecision("bf16-mixed"), ("bf16", "bf16", False, "fp32", True)),
    (DeepSpeedPrecision("16-mixed"), ("fp16", "fp16", False, "fp32", True)),
    (DeepSpeedPrecision("16-true"), ("fp16", "fp16", False, None, True)),
]


@pytest.mark.parametrize(("plugin", "wanted"), STOCK, ids=[f"{type(p).__name__}-{p.precision}" for p, _ in STOCK])
def test_a_stock_plugin(plugin: Precision, wanted: tuple[Any, ...]) -> None:
    found = by_stock(plugin, ONE, _modules(_net()))
    assert (found.storage, found.compute, found.autocast, found.state, found.frozen) == wanted
    assert found.by == f"{type(plugin).__name__}({plugin.precision!r})"


@pytest.mark.parametrize(
    ("precision", "wanted"),
    [
        ("32-true", ("fp32", "fp32", "fp32")),
        ("bf16-mixed", ("fp32", "bf16", "bf16")),
        ("bf16-true", ("bf16", "bf16", "bf16")),
    ],
)
def test_stock_fsdp_gathers_and_sums_in_what_it_says(precision: Any, wanted: tuple[str, ...]) -> None:
    plugin = FSDPPrecision(precision)
    found = by_stock(plugin, FSDPStrategy(precision_plugin=plugin), _modules(_net()))
    assert (found.storage, found.compute, found.reduce) == wanted
    assert not found.autocast  # norms are gathered in half precision too


def test_stock_fsdp_with_a_reduce_dtype_alone_computes_in_the_plugins() -> None:
    plugin = FSDPPrecision("bf16-true")
    strategy = FSDPStrategy(precision_plugin=plugin, mixed_precision=MixedPrecisionOfFSDP(reduce_dtype=torch.float32))
    found = by_stock(plugin, strategy, _modules(_net()))
    assert (found.storage, found.compute, found.reduce) == ("bf16", "bf16", "fp32")


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

    for plugin in (Own(), XLAPrecision.__new__(XLAPrecision)):
        found = by_stock(plugin, ONE, _modules(_net()))
        assert (found.storage, found.compute, found.declared("0")) == (None, None, None)
        assert "not judged" in found.notes[0]
