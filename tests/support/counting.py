"""Counts reads of device scalars by the host: what waits for a GPU."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class HostReads(TorchDispatchMode):
    """``with HostReads() as reads: ...; reads.count`` is how often a tensor's value was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return func(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    """Counts what ``HostReads`` cannot see on a CPU: ``tolist`` and its like, asked of a tensor in Python."""

    names = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


class Counts(Callback):
    """How often a tensor's value was asked for in each batch; it comes last, and so watches the others."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.asked = Asked()
        self.asked.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.asked.__exit__(None, None, None)
        self.counts.append(self.asked.count)
