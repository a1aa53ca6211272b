"""Modules that decide themselves what ``module.to(dtype)`` does, as public code writes them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.models import FEATURES

FREQUENCIES = 1.0 / 10_000 ** (torch.arange(FEATURES) / FEATURES)


class KeepsItsBuffer(nn.Module):
    """Rotary frequencies that stay fp32, by the buffer of before: a cast to bf16 and back would round them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", FREQUENCIES.clone(), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.frequencies
        super()._apply(fn, recurse)
        self.frequencies = before.to(self.frequencies.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + (1000 * self.frequencies).sin()).to(x.dtype)


class KeepsAParameter(nn.Module):
    """A decay in fp32, as Mamba's and GatedDeltaNet's ``A_log``."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(FREQUENCIES.clone())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        values = self.decay.data
        super()._apply(fn, recurse)
        self.decay.data = values.to(self.decay.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return x * self.decay.exp().to(x.dtype)


class CastsAnAttribute(nn.Module):
    """ChatGLM's rotary tables: tensors that are neither parameters nor buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = FREQUENCIES.cos().repeat(FEATURES, 1)
        self.missing: Tensor | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Any:
        if self.table is not None:
            self.table = fn(self.table)
        return super()._apply(fn)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table  # raises where the two dtypes differ


class CastsAChildsAttributes(nn.Module):
    """YOLOv5's model, which casts the anchors of the last of its layers, and lists of grids."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, FEATURES), CastsAnAttribute())
        self.layers[-1].grids = [FREQUENCIES.diag(), FREQUENCIES.diag()]

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Any:
        super()._apply(fn)
        last = self.layers[-1]
        last.grids = list(map(fn, last.grids))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) @ self.layers[-1].grids[1]


class Memory(nn.Module):
    """spikingjelly's neurons: states in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[str, Any] = {"v": torch.full((FEATURES, FEATURES), 0.1), "reset": 0.0}

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Any:
        for key, value in self._memories.items():
            if isinstance(value, Tensor):
                self._memories[key] = fn(value)
        return super()._apply(fn)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self._memories["v"]


class Recurrent(nn.Module):
    """torch's own LSTM has an ``_apply`` too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.GRU(FEATURES, FEATURES, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0][:, 0]


CASES: dict[str, type[nn.Module]] = {
    case.__name__: case
    for case in (KeepsItsBuffer, KeepsAParameter, CastsAnAttribute, CastsAChildsAttributes, Memory, Recurrent)
}
