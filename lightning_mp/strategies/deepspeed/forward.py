"""A module inside DeepSpeed's engine: its steps, what is gathered for them, and weights loaded into partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_mp.compat.deepspeed import gather_as, reduce_as_stored
from lightning_mp.compat.lightning import ForwardRedirection
from lightning_mp.compat.torch import load_own_tensors
from lightning_mp.modules import half_weights
from lightning_mp.numerics.dtypes import to_torch


class InsideEngine(ForwardRedirection):
    """Runs a step in the plan's context *inside* DeepSpeed's forward, which turns autocast off around its module."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def __call__(self, wrapper_module: Any, original_module: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method as the forward of ``wrapper_module``; the module's own forward is back before it runs."""
        own = original_module.__dict__.get("forward")  # a user's, put onto the instance

        def bring_back() -> None:
            original_module.__dict__.pop("forward", None)
            if own is not None:
                original_module.forward = own

        def step(*inner: Any, **named: Any) -> Any:
            bring_back()
            with self._plan.forward_context():
                return getattr(original_module, method_name)(*inner, **named)

        original_module.forward = step
        try:
            with torch.autocast(original_module.device.type, enabled=False):
                return wrapper_module(*args, **kwargs)
        finally:
            bring_back()


def gather_halves(module: nn.Module, plan: Any, zero: Any) -> None:
    """Have stage 3 gather in the compute dtype what autocast alone computes with; partitions stay as stored."""
    policy, names = plan.policy, dict[int, str]()
    for weight in half_weights.survey(module, plan.engine.pin_map, policy):
        halves = weight.reason is None and weight.tensor.dtype == torch.float32
        if gather_as(weight.tensor, to_torch(policy.compute_dtype) if halves else None):
            names[id(weight.tensor)] = weight.name
    plan.engine.halves = names
    reduce_as_stored(zero)


def load_full_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """``module.load_state_dict(state)``, one submodule gathered at a time; every rank has all of ``state``.

    Lightning's own way loads buffers on rank 0 alone, and says nothing of names that are missing or do not fit.

    Raises:
        RuntimeError: names are missing or unexpected and ``strict``, or shapes differ.
    """
    import deepspeed

    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    waiting = [("", module)]
    while waiting:
        prefix, part = waiting.pop()
        with deepspeed.zero.GatheredParameters(list(part.parameters(recurse=False)), modifier_rank=0):
            load_own_tensors(part, state, prefix, missing, unexpected, errors)
        waiting += [(f"{prefix}{name}.", child) for name, child in part.named_children()]
    if strict and (missing or unexpected):
        errors.append(f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}")
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: " + "\n\t".join(errors))
