"""Optimizers that people use besides torch's plain ones."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import Adafactor, AdamW
from transformers.optimization import Adafactor as TransformersAdafactor


class Delegating:
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)


class Around(torch.optim.Optimizer):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    @property
    def _step_supports_amp_scaling(self) -> bool:
        return getattr(self.inner, "_step_supports_amp_scaling", False)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return self.inner.step(closure)


def partly_fused(parameters: Any) -> AdamW:
    first, *others = list(parameters)
    return AdamW([{"params": [first]}, {"params": others, "fused": False}], lr=1e-2, eps=1e-4, fused=True)


_fused = partial(AdamW, lr=1e-2, eps=1e-4, fused=True)
OPTIMIZERS: dict[str, Any] = {
    "adafactor": partial(Adafactor, lr=1e-2),
    "adafactor-transformers": partial(TransformersAdafactor, lr=None),
    "delegating": lambda parameters: Delegating(_fused(parameters)),
    "around": lambda parameters: Around(_fused(parameters)),
    "partly-fused": partly_fused,
}
