"""Trained parameters that a host holds in half precision, beside fp32 masters of its own.

Autocast computes with the half value of such a weight and with nothing else (``half_weights`` says of which that is
so): the copy stands in for the weight in its layer's product, and whoever else reads it is told. What a backward pass
adds up of several uses of one weight is added in fp32; autograd would add the gradients of a half leaf in half.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch import in_backward
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics.autocast_weight import AutocastWeight
from lightning_mp.numerics.nested import map_tensors, tensors_in

_DATA: Any = cast("Any", Tensor.data)
_DTYPE: Any = cast("Any", Tensor.dtype)
#: hosts and this package know what a copy is
_KNOW = ("deepspeed.", "lightning_mp.", "lightning.", "pytorch_lightning.")
#: properties that tell values
_VALUES = frozenset(("data", "T", "mT", "H", "mH", "real", "imag"))
#: functions that tell none
_NO_VALUES = frozenset((
    "__hash__", "__len__", "dim", "element_size", "is_complex", "is_floating_point", "nelement", "numel",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "stride",
))  # fmt: skip


class Run:
    """What the copies of one run share."""

    def __init__(self, advice: str) -> None:
        #: where a strategy's fp32 values are found, for messages
        self.advice = advice
        self.in_step = False
        self._warned = False

    @contextmanager
    def step(self) -> Generator[None, None, None]:
        """Around a step of the user's: training, validation, test or prediction."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def read(self, weight: HalfCopy) -> None:
        """Somebody reads ``weight`` who cannot know that it is a copy.

        Raises:
            PlanError: in a step, whose result would not be the one of the fp32 value.
        """
        given = f"{weight.label}, held in {_DTYPE.__get__(weight)} for autocast's products alone, read"
        if self.in_step:
            name = weight.label.rpartition(".")[0]
            fault = Fault(
                f"{given} in another way in a step",
                "matrix products and convolutions under autocast, which read it in the dtype they compute in",
                f"write pins={{{name!r}: 'fp32'}}, which keeps it in fp32, or leave that use out",
            )
            raise PlanError([fault], "MixedPrecisionPlan")
        if not self._warned:
            self._warned = True
            warnings.warn(f"{given} outside of a step (said once a run). {self.advice}", stacklevel=4)


class HalfCopy(nn.Parameter):
    """A parameter in half precision whose master is elsewhere; an fp32 one becomes it by ``hold``."""

    label: str
    run: Run
    #: how many products use it in the graph at hand
    uses: int
    #: what becomes the gradient in fp32: of several products the sum, or what a hook made of it
    total: Tensor | None
    #: whether the gradient is to be fp32 in any case
    in_fp32: bool

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, asked = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
        tells = asked in _VALUES or asked == "dtype" if name in ("__get__", "__set__") else name not in _NO_VALUES
        stranger = tells and not _is_known(inspect.currentframe())
        given: Any = [args, kwargs or {}]
        weight = next((one for one in tensors_in(given) if isinstance(one, cls)), None) if stranger else None
        if weight is not None:
            if asked == "dtype":  # what the code that asks does then is what it does under other strategies
                return torch.float32
            recomputed = torch.is_grad_enabled() and in_backward()
            if (weight.run.in_step or recomputed) and name != "__set__":
                args, kwargs = map_tensors(given, lambda one: one.in_step() if isinstance(one, cls) else one)
                return func(*args, **kwargs)
            weight.run.read(weight)
        if name.endswith("_hook") and not _is_known(inspect.currentframe()):
            args = args[0], args[0].for_hook(args[1], after=name != "register_hook"), *args[2:]
        result = cast("Any", super()).__torch_function__(func, types, args, kwargs or {})  # as for any parameter
        if weight is not None and asked == "data" and name == "__get__":
            vars(weight).setdefault("handed_out", []).append((result, result._version))
        return result

    def in_step(self) -> Tensor:
        """What a step of the user's gets for it: an fp32 weight that autocast may cast, and nobody else may read."""
        if torch.is_grad_enabled() and not in_backward():
            self.uses += 2  # a view of it may be used several times
        return cast("Any", _Use).apply(self, AutocastWeight)

    def for_hook(self, hook: Any, *, after: bool) -> Any:
        """What to register in place of a user's ``hook``, which sees and returns the gradient in fp32."""
        if after:  # it reads .grad
            self.in_fp32 = True
            return hook

        def in_fp32(gradient: Tensor) -> Tensor | None:
            changed = hook(gradient.float() if self.total is None else self.total)
            if changed is None:
                return None
            self.total = changed.float()
            return changed.to(gradient.dtype)

        return in_fp32

    def __deepcopy__(self, memo: Any) -> nn.Parameter:
        self.run.read(self)
        memo[id(self)] = copy = nn.Parameter(_DATA.__get__(self).float(), self.requires_grad)
        return copy


def _is_known(frame: Any) -> bool:
    """Whether the code behind torch's own that called this is one that knows."""
    frame = frame.f_back
    while frame is not None and _module(frame).startswith("torch."):
        frame = frame.f_back
    return frame is not None and _module(frame).startswith(_KNOW)


def _module(frame: Any) -> str:
    return f"{frame.f_globals.get('__name__', '')}."


def stored_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype a parameter is stored in: of a copy, its master's."""
    return torch.float32 if isinstance(parameter, HalfCopy) else parameter.dtype


# ------------------------------------------------------------------ in its layer's product


class _Use(torch.autograd.Function):
    """The half values for one product; its gradient is noted in fp32 where there are others."""

    @staticmethod
    def forward(ctx: Any, weight: HalfCopy, wrap: Any = None) -> Tensor:
        ctx.weight = weight
        data = _DATA.__get__(weight)
        return data if wrap is None else wrap(data, weight.label)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), weight = gradients, ctx.weight
        if weight.uses > 1:
            weight.total = gradient.float() if weight.total is None else weight.total.add_(gradient)
        return gradient, None


def hold(weight: nn.Parameter, dtype: torch.dtype, label: str, run: Run, in_fp32: Callable[[], bool]) -> Any:
    """Make an fp32 parameter a copy in ``dtype``; the hook on its gradient.

    Its gradient is in ``dtype`` too, except where that would lose what autograd adds up in fp32 for an fp32 weight, or
    where ``in_fp32`` asks for it.
    """
    weight.data = weight.data.to(dtype)
    weight.__class__ = HalfCopy
    copy = cast("HalfCopy", weight)
    copy.label, copy.run, copy.uses, copy.total, copy.in_fp32 = label, run, 0, None, False

    def whole(_: Tensor) -> None:
        gradient = cast("Tensor", copy.grad)
        if copy.total is not None:
            gradient.data = copy.total
        elif copy.in_fp32 or in_fp32():
            gradient.data = gradient.data.float()
        copy.uses, copy.total = 0, None

    return copy.register_post_accumulate_grad_hook(whole)


def give_back(weight: HalfCopy, data: Tensor) -> None:
    """Make a copy an ordinary parameter again, with ``data`` as its values."""
    cast("Any", weight).__class__ = nn.Parameter
    weight.data = data
    for name in ("label", "run", "uses", "total", "in_fp32", "handed_out"):
        vars(weight).pop(name, None)


def stand_in(module: nn.Module, holders: Iterable[tuple[nn.Module, str]], dtype: torch.dtype) -> list[Any]:
    """Hand the copies of ``holders`` to the forward of ``module``, which hands each to one product; the hooks.

    Raises:
        PlanError: when it runs where autocast does not cast to ``dtype``.
    """
    held = tuple(holders)

    def before(_module: nn.Module, _inputs: Any) -> None:
        for holder, key in held:
            weight = getattr(holder, key, None)
            if not isinstance(weight, HalfCopy):  # functional_call put its own there
                continue
            device = weight.device.type
            if not (torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == dtype):
                raise _without_autocast(weight)
            if torch.is_grad_enabled() and not in_backward():
                weight.uses += 1
            vars(holder)[key] = cast("Any", _Use).apply(weight)

    def after(*_: Any) -> None:
        for holder, key in held:
            vars(holder).pop(key, None)

    # The user's hooks run outside of these two, and meet the copy itself.
    behind = module.register_forward_hook(after, prepend=True, always_call=True)
    return [module.register_forward_pre_hook(before), behind]


def _without_autocast(weight: HalfCopy) -> PlanError:
    name = weight.label.rpartition(".")[0]
    fault = Fault(
        f"{weight.label}, held in {_DTYPE.__get__(weight)}, used where autocast is off or casts to another dtype",
        "the plan's autocast, under which nothing but the half value is used",
        f"write pins={{{name!r}: 'fp32'}}, or run it within trainer.precision_plugin.forward_context()",
    )
    return PlanError([fault], "MixedPrecisionPlan")
