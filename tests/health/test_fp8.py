"""What TrainingHealth lays a non-finite step under FP8 to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_mp import NonFiniteError
from lightning_mp.callbacks import TrainingHealth
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
