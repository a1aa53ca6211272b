"""Faults planted in a run under FP8, each in one layer and one operand, and the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mp import make_strategy
from lightning_mp.callbacks import TrainingHealth
from support import fp8
from support.sharded import WAIT, on, rank

LAYER, AT = "blocks.0.up", 22


class Changed(torch.autograd.Function):
    """Hands its input on; what comes back is changed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.change(gradients[0].clone()), None


def _one_large(values: Tensor) -> Tensor:
    """In every row one value far above the others."""
    return torch.cat((1e5 * values.abs().amax(-1, keepdim=True) + 1, values[..., 1:]), -1)


def _input(module: Any, change: Callable[[Tensor], Tensor], since: int) -> None:
    layer = module.get_submodule(LAYER)
    layer.register_forward_pre_hook(lambda _, a: (change(a[0]),) if module.trainer.global_step >= since else None)


def input_outlier(module: Any) -> None:
    """One feature of the layer's input is far above the others."""
    _input(module, _one_large, 0)


def input_jump(module: Any) -> None:
    """The layer's input grows 500-fold in the midst of the run."""
    _input(module, lambda x: 500 * x, AT)


def weight_outlier(module: Any) -> None:
    """One column of the layer's weight is far above the others."""
    with torch.no_grad():
        module.get_submodule(LAYER).weight[:, 0] = 1e6


def gradient_outlier(module: Any) -> None:
    """One entry of every gradient that comes back is far above the others."""
    layer = module.get_submodule(LAYER)
    layer.register_forward_hook(lambda _, a, output: Changed.apply(output, _one_large))


FAULTS = {
    ("fp8_underflow", "input"): input_outlier,
    ("fp8_underflow", "weight"): weight_outlier,
    ("fp8_underflow", "gradient"): gradient_outlier,
    ("scale_jump", "input"): input_jump,
}


def watched(
    folder: Path,
    recipe: str = "rowwise",
    *,
    steps: int = 12,
    plant: Callable[[Any], None] | None = None,
    monitor: dict[str, Any] | None = None,
    rule: dict[str, Any] | None = None,
    compiled: str | None = None,
    **options: Any,
) -> tuple[TrainingHealth, Any, Any]:
    """The monitor, the module and the plan after a run."""
    health = TrainingHealth(folder / "run", **{"report": False, **(monitor or {})})
    module, plugin = fp8.Language(compiled), fp8.plan(recipe, **{"emulate": True, **(rule or {})})
    if plant is not None:
        plant(module)
    callbacks = [health, *options.pop("callbacks", [])]
    data = options.pop("data", None) or fp8.texts(rows=4 * steps)
    fp8.run(module, plugin, data=data, callbacks=callbacks, max_steps=steps, max_epochs=-1, **options)
    return health, module, plugin


@dataclass(frozen=True)
class Across:
    """Two processes with texts of their own; an input of the layer jumps."""

    strategy: str
    folder: Path
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    rule: dict[str, Any] = field(default_factory=dict[str, Any])

    def run(self) -> dict[str, Any]:
        plugin = fp8.plan("tensorwise", emulate=True, **self.rule)
        health = TrainingHealth(self.folder / "run", report=False)
        module = fp8.Plain()
        input_jump(module)
        own = {} if "deepspeed" in self.strategy else {"process_group_backend": "gloo"}
        options: dict[str, Any] = {"timeout": WAIT["timeout"], **own, **self.options}
        steps = AT + 4
        fp8.run(
            module,
            plugin,
            data=fp8.texts(rows=4 * steps, seed=3 + rank()),
            callbacks=[health],
            max_steps=steps,
            **on(make_strategy(self.strategy, plugin, **options)),
        )
        return {
            "rows": health.fp8_rows,
            "events": [event.to_dict() for event in health.events if event.kind == "scale_jump"],
            "losses": module.losses,
        }
