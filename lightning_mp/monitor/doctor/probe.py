"""What a norm of someone's own does to the dtype of its input, seen by running a copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch import TorchDispatchMode
from lightning_mp.modules import pins
from lightning_mp.numerics.dtypes import HALF, to_torch

# fmt: off
#: aten operators that sum
_SUMS = frozenset((
    "mean", "sum", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm",
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm",
))
# fmt: on


class _Sums(TorchDispatchMode):
    """Notes whether anything is summed whose every tensor is in half precision."""

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _SUMS:
            dtypes = {item.dtype for item in args if isinstance(item, Tensor) and item.is_floating_point()}
            self.seen |= bool(dtypes) and all(dtype in HALF for dtype in dtypes)
        return func(*args, **(kwargs or {}))

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have dynamo compile as if this mode were not there: else it skips what it meets under one, for good."""
        return True


def reduces_in_half(module: nn.Module, stored: str) -> bool:
    """Whether ``module``, with weights and an input in ``stored``, sums over half-precision numbers.

    A copy runs on the CPU.

    Raises:
        RuntimeError: it takes none of the inputs that norms take.
    """
    copied = deepcopy(module)
    pins.remove([copied])
    copied = _filled(copied).to(to_torch(stored))
    for shape in _shapes(copied):
        try:
            with torch.no_grad(), _Sums() as sums:
                copied.forward(torch.ones(shape, dtype=to_torch(stored)))  # not by a call: hooks are the user's
        except (RuntimeError, IndexError, ValueError):
            continue
        return sums.seen
    raise RuntimeError(f"{type(module).__name__} takes neither (batch, length, width) nor (batch, channels, h, w)")


def _filled(module: nn.Module) -> nn.Module:
    """On the CPU, with ones for what has no values (a model on the meta device)."""
    if not any(parameter.is_meta for parameter in module.parameters()):
        return module.cpu()
    module = module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def _shapes(module: nn.Module) -> Iterator[tuple[int, ...]]:
    width = max((parameter.numel() for parameter in module.parameters()), default=8)
    yield (2, 3, width)
    yield (2, width, 3, 3)
    yield (2, width)
