"""What a norm of someone's own does to the dtype of its input, seen by running a copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_mp.compat.torch import TorchDispatchMode
from lightning_mp.modules import pins
from lightning_mp.numerics.dtypes import HALF, cast_floating, to_torch

# fmt: off
#: aten operators that sum
_SUMS = frozenset((
    "mean", "sum", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm",
    "native_layer_norm", "native_group_norm", "native_batch_norm", "_fused_rms_norm",
))
#: what CUDA's autocast runs in fp32, https://docs.pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float32;
#: ``x ** 2`` and ``square`` are ``pow``
_CUDA_FP32 = frozenset((
    "__pow__", "__rdiv__", "__rpow__", "__rtruediv__", "acos", "asin", "cosh", "cosine_similarity", "cross_entropy",
    "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "kl_div", "l1_loss", "layer_norm", "log",
    "log10", "log1p", "log2", "log_softmax", "mse_loss", "nll_loss", "norm", "normalize", "pow", "prod",
    "reciprocal", "renorm", "rsqrt", "sinh", "smooth_l1_loss", "softmax", "softmin", "softplus", "square", "sum",
    "tan", "vector_norm",
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


class _CudaAutocast(TorchFunctionMode):
    """What CUDA's autocast does to the operators of norms, on any machine."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: tuple[Any, Mapping[str, Any]] = (args, kwargs or {})
        if getattr(func, "__name__", "") in _CUDA_FP32:
            given = cast_floating(given[0], torch.float32), cast_floating(given[1], torch.float32)
        return func(*given[0], **given[1])


def reduces_in_half(module: nn.Module, *, stored: str, given: str, autocast: str | None) -> bool:
    """Whether ``module``, with weights in ``stored`` and an input in ``given``, sums over half-precision numbers.

    A copy runs on the CPU, under the rules of autocast on a device of type ``autocast`` where one is named.

    Raises:
        RuntimeError: it takes none of the inputs that norms take.
    """
    copied = deepcopy(module)
    pins.remove([copied])
    copied = _filled(copied).to(to_torch(stored))
    for shape in _shapes(copied):
        context: AbstractContextManager[Any] = nullcontext()
        if autocast == "cpu":
            context = torch.autocast("cpu", to_torch(given))
        elif autocast is not None:
            context = _CudaAutocast()
        try:
            with torch.no_grad(), context, _Sums() as sums:
                copied.forward(torch.ones(shape, dtype=to_torch(given)))  # not by a call: hooks are the user's
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
