"""Weights that only products under autocast read, and a tensor class that holds them in half.

A strategy may gather such a weight in the compute dtype. A weight qualifies if the module's forward
only passes it to a product that autocast casts.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch import NO_TORCH_FUNCTION, as_wrapper
from lightning_mp.compat.transformers import conv1d
from lightning_mp.errors import PlanError
from lightning_mp.modules import fp8
from lightning_mp.modules.patterns import Place, original_class, owners
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import dtype_name, floating_in, is_plain
from lightning_mp.policy import PrecisionPolicy

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
#: the attribute of peft's layers with DoRA's norms. DoRA reads the weights below to compute them.
_DORA = "lora_magnitude_vector"
#: methods that a subclass must not replace
_FORWARDS = ("forward", "_conv_forward")


class Weight(NamedTuple):
    """A parameter that only matrix products under autocast read, and its places in modules."""

    name: str
    tensor: Tensor
    places: list[Place]


def survey(root: nn.Module, pin_map: PinMap, policy: PrecisionPolicy) -> list[Weight]:
    """Return each such parameter of ``root`` once, before or after it is sharded.

    The list is empty unless the policy's mode is mixed. Parameters of pinned, FP8 and DoRA modules
    are left out, and tied parameters if one owner reads them in another way.
    """
    if not policy.mixed:
        return []
    dora = (module for module in root.modules() if getattr(module, _DORA, None))
    wide = [member for member in pin_map.wide if member.pin.dtype != policy.compute_dtype]
    others = {member.module for member in (*pin_map.members, *wide)}
    others |= {part for module in dora for part in module.modules()} | set(filter(fp8.is_converted, root.modules()))
    places = owners(root)
    return [
        Weight(name, tensor, places[id(tensor)])
        for name, tensor in root.named_parameters()
        if (is_plain(tensor) or hasattr(tensor, "to_local")) and tensor.is_floating_point()
        if all(module not in others and key in _keys(module) for _, module, key in places[id(tensor)])
    ]


def multiplies(module: nn.Module) -> bool:
    """True if ``module`` is a layer that multiplies by weights: linear, convolution, attention."""
    return isinstance(module, (*_LAYERS, *conv1d(), nn.MultiheadAttention))


def _keys(module: nn.Module) -> tuple[str, ...]:
    """Return the names of parameters that the forward of ``module`` only passes to one product.

    It is empty for a module that is no such layer, and for one whose ``forward`` is replaced.
    """
    cls = original_class(module)
    kind = next((kind for kind in (*_LAYERS, *conv1d(), nn.MultiheadAttention) if issubclass(cls, kind)), None)
    own = [] if kind is None else [vars(base) for base in cls.__mro__[: cls.__mro__.index(kind)]]
    if kind is None or any(name in place for place in (vars(module), *own) for name in _FORWARDS):
        return ()
    return _PROJECTIONS if kind is nn.MultiheadAttention else ("weight", "bias")


# ------------------------------------------------------------------ the tensor class

#: packages whose frames are not the user's code
_NOT_THE_USERS = ("torch.", "deepspeed.", "lightning_mp.", "lightning.", "pytorch_lightning.")


class AutocastWeight(Tensor):
    """A tensor whose dtype is fp32, and which holds half values in ``held``.

    A cast to the half dtype, as autocast makes it, returns an alias of ``held`` without a copy. A
    view is such a tensor again. Functions that read no value, such as ``zeros_like``, return plain
    tensors in fp32. Autograd casts the gradient of each use to fp32 before it adds gradients. A
    plain half weight would add them in half.

    Raises:
        PlanError: from any other use, because it would need the fp32 values. The error names the
            weight and the pin.
    """

    held: Tensor
    label: str
    __torch_function__ = NO_TORCH_FUNCTION

    def __new__(cls, held: Tensor, label: str) -> AutocastWeight:
        weight = as_wrapper(cls, held, torch.float32)
        weight.held, weight.label = held, label
        return weight

    def __init__(self, held: Tensor, label: str) -> None: ...

    @property
    def data(self) -> Tensor:
        """Return a view without gradients.

        An assignment raises PlanError, because only rounded values are here.
        """
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise written_in_step(self.label, self.held.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AutocastWeight({self.label!r}, {tuple(self.shape)}, held in {self.held.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None  # without the name: blocks that differ in it alone share a graph

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _context: None, _size: Any, _stride: Any) -> AutocastWeight:
        return AutocastWeight(inner["held"], "a weight of a compiled module")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weight, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(weight, cls):
            held, label, name = weight.held, weight.label, func.overloadpacket.__name__
            if name == "_to_copy" and kwargs.get("dtype") is held.dtype:
                return held.detach()
            if func.is_view:
                views = func(held, *args[1:], **kwargs)
                return cls(views, label) if isinstance(views, Tensor) else [cls(view, label) for view in views]
            if reads_no_value(name):
                return func(held, *args[1:], **{"dtype": torch.float32, **kwargs})
        other = next(item for item in floating_in([args, kwargs]) if isinstance(item, AutocastWeight))
        if not (other.requires_grad and torch.is_grad_enabled()):  # as where a teacher follows its student
            raise written_in_step(other.label, other.held.dtype)
        raise other_use(other.label, other.held.dtype, func)


def reads_no_value(name: str) -> bool:
    """True if a function of this name reads only shape, dtype or device: ``*_like``, ``new_*``."""
    return name.endswith("_like") or name.startswith("new_")


def users_line() -> str:
    """Return ``", file.py:12"`` for the innermost frame of user code, as part of a message.

    Without such a frame return an empty string.
    """
    frame = inspect.currentframe()
    while frame is not None and f"{frame.f_globals.get('__name__', '')}.".startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return "" if frame is None else f", {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def other_use(name: str, dtype: torch.dtype, func: Any) -> PlanError:
    """Return the PlanError for a call of ``func`` that needs fp32 values of the weight ``name``.

    The weight is gathered in ``dtype``.
    """
    return PlanError.of(
        f"{name} is {dtype_name(dtype)} under this strategy, where autocast alone computes with it; something reads it "
        f"outside a matmul ({func.overloadpacket.__name__}{users_line()})",
        f"pin it: pins={{{name.rpartition('.')[0]!r}: 'fp32'}}",
    )


def written_in_step(name: str, dtype: torch.dtype) -> PlanError:
    """Return the PlanError for a weight that a step reads or writes without a gradient.

    The weight is gathered in ``dtype``.
    """
    return PlanError.of(
        f"{name} is {dtype_name(dtype)} in a step under this strategy, where autocast alone computes with it; "
        f"something reads or writes its values there{users_line()}",
        "do it between steps, in on_train_batch_start or on_train_batch_end, where its fp32 values are; or pin it: "
        f"pins={{{name.rpartition('.')[0]!r}: 'fp32'}}",
    )
