"""TrainingHealth of a run under FP8: its utilisation, and what a non-finite step is laid to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp import NonFiniteError
from lightning_mp.callbacks import TrainingHealth
from lightning_mp.health import throughput
from lightning_mp.policy import hardware
from lightning_mp.record import metric_names
from support import fp8

pytest.importorskip("torchao")
LAYER = "blocks.0.up"


class Changed(torch.autograd.Function):
    """Hands its input on; what comes back is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.change(gradients[0].clone()), None


def test_mfu_counts_fp8_products_at_fp8s_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were an H100: the time that each kind of product takes at its own peak, over the time it took."""
    h100 = hardware.Device("cuda", "NVIDIA H100 80GB HBM3", (9, 0))
    monkeypatch.setattr(throughput, "describe", lambda _: h100)
    health = TrainingHealth(tmp_path / "run", report=False)
    fp8.run(fp8.Language(), fp8.plan("rowwise"), data=fp8.texts(rows=8, length=8), callbacks=[health], max_steps=2)
    in_fp8, rest = 4 * 6 * fp8.WIDTH * 2 * fp8.WIDTH, 6 * fp8.WIDTH * fp8.VOCABULARY  # a token, forward and backward
    bf16, faster = (hardware.peak(h100, dtype) for dtype in ("bf16", "fp8"))
    assert bf16 is not None
    assert faster is not None
    assert faster.flops_per_s > bf16.flops_per_s
    ideal = in_fp8 / faster.flops_per_s + rest / bf16.flops_per_s
    for row in health.rows:
        assert row[metric_names.MFU] == pytest.approx(ideal * row[metric_names.TOKENS_PER_S])


def _inf(values: Tensor) -> Tensor:
    return values * torch.inf


@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
def test_a_bad_step_names_layer_and_operand(role: str, tmp_path: Path) -> None:
    module = fp8.Language()
    layer: Any = module.get_submodule(LAYER)
    if role == "weight":
        layer.weight.data[3, 3] = torch.nan
    elif role == "input":
        layer.register_forward_pre_hook(lambda _, a: (_inf(a[0]),))
    else:
        layer.register_forward_hook(lambda _, a, output: Changed.apply(output, _inf))
    health = TrainingHealth(tmp_path / "run", report=False)
    with pytest.raises(NonFiniteError, match="applied 0 of its 2"):
        fp8.run(module, fp8.plan("rowwise"), data=fp8.texts(rows=8), callbacks=[health], max_steps=2)
    event = health.events[0]
    assert event.kind.startswith("nonfinite")
    assert (event.module, event.evidence["role"]) == (LAYER, role)
