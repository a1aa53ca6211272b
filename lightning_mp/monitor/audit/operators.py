"""What an operator says about the module it ran in: a product, a norm, a look-up, or elementwise, in which dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lightning_mp.compat.torch import OpOverload
from lightning_mp.compat.torchao import held_dtype
from lightning_mp.monitor.dtype_names import dtype_name
from lightning_mp.numerics.nested import floating_in
from lightning_mp.numerics.tf32 import has_tf32

Kind = Literal["product", "attention", "norm", "lookup", "statistic", "pointwise"]

_CONVOLUTIONS = ("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "miopen_convolution")
_RNN = ("_cudnn_rnn", "mkldnn_rnn_layer", "miopen_rnn")
#: what torch's autocast lists run in the lower precision on every device ("Autocast Op Reference"), as it arrives here
_PRODUCTS = frozenset(
    (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "linear",
        "matmul",
        "_addmm_activation",
        "_grouped_mm",
        "_scaled_mm",
        "_scaled_grouped_mm",
        "_efficient_attention_forward",
        "_flash_attention_forward",
        *_CONVOLUTIONS,
        *_RNN,
    )
)
_NORMS = frozenset(
    ("native_layer_norm", "native_group_norm", "_fused_rms_norm", "layer_norm", "group_norm", "rms_norm")
)
_LOOKUPS = frozenset(("embedding", "embedding_bag", "_embedding_bag"))
_STATISTICS = frozenset(("mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm", "rsqrt", "sqrt"))
#: products that the lists name on some devices only, and what torch forgot to tag as elementwise
_AS_POINTWISE = frozenset(("mv", "addmv", "dot", "_trilinear", "_prelu_kernel"))
_COPIES = frozenset(("clone", "copy", "copy_", "fill", "fill_", "zero_"))


@dataclass(frozen=True, slots=True)
class Ran:
    """One kind of operator in one combination of dtypes (short names, sorted).

    An ``"attention"`` is a product in torch's plain attention kernel, which widens half precision to fp32 by itself.
    ``weighted`` tells a norm that has weights or running statistics beside its input.
    """

    kind: Kind
    dtypes: tuple[str, ...]
    weighted: bool = False


def read(func: Any, args: tuple[Any, ...], result: Any) -> Ran | None:
    """What ``func(*args)`` was, or ``None`` where its dtype says nothing (copies, views, creation, integers)."""
    name = func.overloadpacket.__name__
    if is_product(name):
        return _ran("product", _products(name, args))
    if name in _NORMS or ("batch_norm" in name and "backward" not in name):
        tensors = floating_in(args)
        return _ran("norm", {dtype_name(tensor.dtype) for tensor in tensors}, weighted=len(tensors) > 1)
    if name in _LOOKUPS:
        return _ran("lookup", dtypes(args[:1]))
    if name in _STATISTICS:
        return _ran("statistic", dtypes(result))
    if name in _AS_POINTWISE or (torch.Tag.pointwise in cast("OpOverload", func).tags and name not in _COPIES):
        return _ran("pointwise", dtypes(result))
    return None


def is_product(name: str) -> bool:
    """Whether the aten operator multiplies matrices, attention and convolution included."""
    return name in _PRODUCTS or (name.startswith(("_scaled_dot_product", "scaled_dot")) and "backward" not in name)


def _ran(kind: Kind, found: set[str], weighted: bool = False) -> Ran | None:
    return Ran(kind, tuple(sorted(found)), weighted) if found else None


def _products(name: str, args: tuple[Any, ...]) -> set[str]:
    # The factors come first; what follows (a mask, a scale) does not decide what is multiplied in.
    factors = [item for item in args if isinstance(item, Tensor) and item.is_floating_point()][:2]
    return {
        _fp32_or_tf32(name, item.device) if dtype == torch.float32 else dtype_name(dtype)
        for item, dtype in ((item, held_dtype(item)) for item in factors)
    }


def _fp32_or_tf32(name: str, device: torch.device) -> str:
    if not has_tf32(device):
        return "fp32"
    cudnn: Any = torch.backends.cudnn
    switch: Any = torch.backends.cuda.matmul
    if name in _CONVOLUTIONS:
        switch = getattr(cudnn, "conv", cudnn)
    elif name in _RNN:
        switch = getattr(cudnn, "rnn", cudnn)
    # torch 2.9 has a switch an operation, which tells what is in force; older ones raise where both are set
    on = switch.fp32_precision == "tf32" if hasattr(switch, "fp32_precision") else switch.allow_tf32
    return "tf32" if on else "fp32"


def dtypes(data: Any) -> set[str]:
    """The short names of the floating dtypes in nested ``data``."""
    return {dtype_name(tensor.dtype) for tensor in floating_in(data)}
