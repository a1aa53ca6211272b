"""torchao's private names, each behind a public name. torchao is imported in the functions."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor

from lightning_mp.compat import quietly, require_versions
from lightning_mp.errors import MissingExtraError

#: torchao's names of the plan's recipes, if they differ
_RECIPES = {"rowwise_gw_hp": "rowwise_with_gw_hp"}

#: multiplies rows (tokens, in) by a transposed weight (in, out), in FP8 in both passes
Product = Callable[[Tensor, Tensor], Tensor]


def require() -> None:
    """Import torchao's FP8 part.

    Raises:
        MissingExtraError: torchao is not installed.
        PlanError: its release is not supported.
    """
    if find_spec("torchao") is None:
        raise MissingExtraError("torchao", "fp8", "precision 'fp8-mixed'")
    with quietly():  # torchao logs a line for each compiled library that does not fit this machine
        import_module("torchao.float8")
    require_versions("MixedPrecisionPlan", "torchao")


def loadable_anywhere(tensor: Tensor) -> Tensor:
    """Return torchao's ``tensor`` in a form that ``torch.load`` rebuilds under any ``map_location``.

    torch's own pickle of such a tensor accepts no function as ``map_location``, and Lightning's
    strategies pass one. This pickle is a call of its class with its tensors and plain values. The
    memory is shared.

    Any other tensor is returned unchanged. So is a torchao tensor that cannot be rebuilt from its
    attributes.
    """
    kind: Any = type(tensor)
    flatten: Any = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or not kind.__module__.startswith("torchao."):
        return tensor
    try:
        rebuilt = _pickled_as_call(kind)(*_arguments_of(tensor))
        names, values = flatten()
        equal = rebuilt.__tensor_flatten__() == (names, values)
    except (AttributeError, TypeError, ValueError, AssertionError):
        return tensor
    same = all(getattr(rebuilt, name) is getattr(tensor, name) for name in names)
    return rebuilt if equal and same else tensor


def _arguments_of(tensor: Any) -> list[Any]:
    """Return the arguments that build ``tensor`` again: its attributes of the arguments' names.

    Raises:
        AttributeError: an argument has no attribute of its name.
    """
    return [getattr(tensor, name) for name in list(signature(type(tensor).__new__).parameters)[1:]]


@cache
def _pickled_as_call(kind: Any) -> Any:
    """Return a subclass of ``kind`` whose instances are pickled as a call of ``kind``."""

    def reduce(self: Any, protocol: Any) -> Any:
        return kind, tuple(_arguments_of(self))

    return type(kind.__name__, (kind,), {"__reduce_ex__": reduce, "__module__": kind.__module__})


def _float8(module: str) -> Any:
    return import_module(f"torchao.float8.{module}")


@cache
def _recipe(recipe: str, emulate: bool) -> tuple[Any, Any]:
    """Return torchao's configurations for one of the plan's recipes: of the layer, of the products.

    Raises:
        MissingExtraError: torchao is not installed.
        PlanError: its release is not supported.
    """
    require()
    tensors = _float8("float8_training_tensor")
    config = _float8("config").Float8LinearConfig.from_recipe_name(_RECIPES.get(recipe, recipe))
    config = replace(config, emulate=emulate)
    products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    each = (tensors.ScaledMMConfig(emulate, product.use_fast_accum, False, False) for product in products)
    return config, tensors.LinearMMConfig(*each)


@cache
def _has_mx_kernels() -> bool:
    """True if this machine has MXFP8 kernels: capability 10.x, CUDA 12.8, torchao's library."""
    cuda = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if cuda < (12, 8) or not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        return False
    try:
        import_module("torchao._C_mxfp8")
    except ImportError:
        return False
    return True


def emulates(recipe: str, emulate: bool) -> bool:
    """True if a recipe rounds its operands to FP8 and multiplies them in a wider format.

    It is True with ``emulate``, and for MXFP8 on a machine without its kernels.
    """
    return emulate or (recipe.startswith("mxfp8") and not _has_mx_kernels())


def _mx_product(recipe: str, emulate: bool) -> Product:
    require()
    with quietly():
        mx: Any = import_module("torchao.prototype.moe_training.mxfp8_linear")
    kernels = mx.KernelPreference.EMULATED if emulates(recipe, emulate) else mx.KernelPreference.AUTO

    def multiplied(rows: Tensor, weight_t: Tensor) -> Tensor:
        # torchao takes contiguous operands of one dtype. RCEIL rounds scales up, so that no number
        # saturates. The error of FLOOR is larger by a half.
        weight_of = weight_t.t().to(rows.dtype).contiguous()
        return mx._to_mxfp8_then_scaled_mm(
            rows.contiguous(), weight_of, kernels, mx.ScaleCalculationMode.RCEIL, recipe.endswith("_gw_hp")
        )

    return multiplied


@cache
def product(recipe: str, *, emulate: bool) -> Product:
    """Return the function that multiplies by one of the plan's recipes.

    With ``emulate`` it rounds the operands to FP8 and multiplies them in fp32. MXFP8 is also
    emulated on a machine without its kernels.

    Raises:
        MissingExtraError: torchao is not installed.
        PlanError: its release is not supported.
    """
    if recipe.startswith("mxfp8"):
        return _mx_product(recipe, emulate)
    config, how = _recipe(recipe, emulate)
    # torchao's own conversion applies this patch too. Without it compiled kernels are wrong.
    _float8("_inductor_patch")._patch_inductor_min_max_codegen()
    multiply = _float8("float8_linear").matmul_with_hp_or_float8_args.apply
    return lambda rows, weight_t: multiply(rows, weight_t, how, config)


def largest_number(recipe: str, role: str) -> float:
    """Return the largest number of the format in which a recipe rounds an operand.

    ``role`` is ``"input"``, ``"weight"`` or ``"gradient"``.
    """
    if recipe.startswith("mxfp8"):
        return torch.finfo(torch.float8_e4m3fn).max
    config, _ = _recipe(recipe, False)
    casts = {
        "input": config.cast_config_input,
        "weight": config.cast_config_weight,
        "gradient": config.cast_config_grad_output,
    }
    return torch.finfo(casts[role].target_dtype).max


# ------------------------------------------------------------------ weights that are gathered in FP8


def scales(amax: Tensor) -> Tensor:
    """Return the scales that map the largest magnitudes ``amax`` to e4m3's largest number.

    ``amax`` is in fp32, of any shape.
    """
    return _float8("float8_utils").amax_to_scale(amax, torch.float8_e4m3fn)


def rounded(weight: Tensor, scale: Tensor) -> Tensor:
    """Return ``weight * scale``, rounded to e4m3. Numbers beyond its range saturate."""
    return _float8("float8_utils").to_fp8_saturated(weight.float() * scale, torch.float8_e4m3fn)


def weight(data: Tensor, scale: Tensor, dtype: torch.dtype, *, emulate: bool) -> Tensor:
    """Return torchao's tensor of the e4m3 bytes ``data``, for the tensorwise product.

    ``dtype`` is the dtype that the tensor reports, and the dtype of the numbers before rounding.
    """
    tensors, (_, how) = _float8("float8_training_tensor"), _recipe("tensorwise", emulate)
    role = tensors.GemmInputRole.WEIGHT
    return tensors.Float8TrainingTensor(data.view(torch.float8_e4m3fn), scale, dtype, how, gemm_input_role=role)


def set_scale(tensor: Any, scale: Tensor) -> None:
    """Replace the scale of a tensor that ``weight`` has made."""
    tensor._scale = scale


#: casts torchao's FP8 tensor to the dtype that it reports
restored = methodcaller("to_original_precision")


def held_dtype(tensor: Any) -> torch.dtype:
    """Return the dtype of the stored numbers.

    torchao's FP8 and MX tensors report the dtype from which they were made. For any other tensor it
    is its dtype.
    """
    if type(tensor).__name__ == "MXTensor":
        return tensor.qdata.dtype
    return tensor._data.dtype if holds_fp8(tensor) else tensor.dtype


def holds_fp8(tensor: Tensor) -> bool:
    """True if the tensor is torchao's FP8 tensor with one scale, not an MX tensor."""
    return type(tensor).__name__ == "Float8TrainingTensor"
