"""What of DeepSpeed is prevented, changed or undone: casts, gathers, autocast, patched torch functions, old hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from lightning_mp.compat.checks import require_versions
from lightning_mp.compat.deepspeed import gather_as, reduce_as_stored
from lightning_mp.compat.lightning import ForwardRedirection
from lightning_mp.errors import MissingExtraError
from lightning_mp.modules import half_weights
from lightning_mp.modules.half_copies import Run
from lightning_mp.numerics.dtypes import to_torch

#: where the function comes from that stage 3 puts in place of torch's
_ZERO_LINEAR = "deepspeed.runtime.zero.linear"
#: the ZeRO optimizer that put its hooks into a module last, and which they keep alive
_former: weakref.WeakKeyDictionary[nn.Module, Callable[[], Any]] = weakref.WeakKeyDictionary()


def require_deepspeed() -> None:
    """Raise if DeepSpeed is missing, or a release that is out of bounds."""
    try:
        import_module("deepspeed")
    except ImportError as error:
        raise MissingExtraError("deepspeed", "deepspeed", "a ZeRO strategy") from error
    require_versions("strategy", "deepspeed")


def remove_old_hooks(module: nn.Module) -> None:
    """Take the hooks of the ZeRO optimizer of an earlier run off ``module``; they would reduce its gradients too."""
    before = _former.pop(module, None)
    optimizer = None if before is None else before()
    if optimizer is not None:
        optimizer.destroy()


def note_hooks(module: nn.Module, optimizer: Any) -> None:
    """Note which ZeRO optimizer put its hooks into ``module``."""
    if hasattr(optimizer, "destroy"):
        _former[module] = weakref.ref(optimizer)


def gather_halves(module: nn.Module, plan: Any, zero: Any) -> None:
    """Have stage 3 gather in the compute dtype what autocast alone computes with; partitions stay as stored."""
    policy, names = plan.policy, dict[int, str]()
    for weight in half_weights.survey(module, plan.engine.pin_map, policy):
        halves = weight.reason is None and weight.tensor.dtype == torch.float32
        if gather_as(weight.tensor, to_torch(policy.compute_dtype) if halves else None):
            names[id(weight.tensor)] = weight.name
    plan.engine.halves = names
    if hasattr(zero, "ipg_buckets"):
        reduce_as_stored(zero)


class FunctionalLinear:
    """Restores ``torch.nn.functional.linear``, which stage 3 replaces for the process and leaves replaced."""

    def __init__(self) -> None:
        self._own: Callable[..., torch.Tensor] | None = None

    def remember(self) -> None:
        """Before DeepSpeed makes or takes a model."""
        if functional.linear.__module__ != _ZERO_LINEAR:
            self._own = functional.linear

    def restore(self) -> None:
        """After the run."""
        if self._own is not None and functional.linear.__module__ == _ZERO_LINEAR:
            functional.linear = self._own


class InsideEngine(ForwardRedirection):
    """Runs a step in the plan's context *inside* DeepSpeed's forward, which turns autocast off around its module."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        #: half copies of the weights, if there are any
        self.copies: Run | None = None

    def __call__(self, wrapper_module: Any, original_module: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method as the forward of ``wrapper_module``; the module's own forward is back before it runs."""
        own = original_module.__dict__.get("forward")  # a user's, put onto the instance

        def bring_back() -> None:
            original_module.__dict__.pop("forward", None)
            if own is not None:
                original_module.forward = own

        def step(*inner: Any, **named: Any) -> Any:
            bring_back()
            with self._plan.forward_context(), nullcontext() if self.copies is None else self.copies.step():
                return getattr(original_module, method_name)(*inner, **named)

        original_module.forward = step
        try:
            with torch.autocast(original_module.device.type, enabled=False):
                return wrapper_module(*args, **kwargs)
        finally:
            bring_back()
