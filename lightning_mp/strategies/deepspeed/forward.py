"""A module inside DeepSpeed's engine: its steps, what is gathered for them, its weights and its param groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.compat.deepspeed import gather_as, reduce_as_stored
from lightning_mp.compat.lightning import ForwardRedirection
from lightning_mp.compat.torch import INNER_SCHEDULERS, load_own_tensors
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


# ------------------------------------------------------------------ param groups of one dtype each

#: how the names end of a scheduler's lists that hold an entry a group (torch's own, and what others call theirs)
_PER_GROUP = ("lr", "lrs", "lambdas", "momentums")


def by_dtype(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Trained parameters in lists of one dtype, fp32 first; frozen ones, which are not flattened, end the first list.

    DeepSpeed takes the first parameter's dtype for that of the engine.
    """
    everything = list(parameters)
    trained = [parameter for parameter in everything if parameter.requires_grad]
    frozen = [parameter for parameter in everything if not parameter.requires_grad]
    dtypes = sorted({parameter.dtype for parameter in trained}, key=lambda dtype: (dtype != torch.float32, str(dtype)))
    lists = [[parameter for parameter in trained if parameter.dtype == dtype] for dtype in dtypes] or [[]]
    lists[0] += frozen
    return lists


def split_by_dtype(optimizer: Optimizer, scheduler: Any) -> list[int]:
    """Split groups that hold several dtypes, in place; for each new group, the index of the one it came from.

    A group whose trained parameters are fp32 comes first, one with none to train last. A scheduler's lists of one entry
    a group follow.
    """
    split = [by_dtype(cast("list[Tensor]", group["params"])) for group in optimizer.param_groups]
    pieces = [(_rank(members), index, members) for index, lists in enumerate(split) for members in lists]
    pieces.sort(key=lambda piece: piece[0])  # stable
    came_from = [index for _, index, _ in pieces]
    old = len(optimizer.param_groups)
    if came_from == list(range(old)):
        for _, index, members in pieces:
            optimizer.param_groups[index]["params"] = members
        return came_from
    optimizer.param_groups[:] = [{**optimizer.param_groups[index], "params": members} for _, index, members in pieces]
    if scheduler is not None:
        regroup(vars(scheduler), old, came_from)
    return came_from


def _rank(members: Sequence[Tensor]) -> int:
    if not members or not members[0].requires_grad:
        return 2
    return int(members[0].dtype != torch.float32)


def regroup(state: dict[str, Any], size: int, came_from: Sequence[int]) -> None:
    """Reorder a scheduler's lists of ``size`` entries, one a group: group ``i`` gets that of ``came_from[i]``.

    Milestones and phases may be as many as there are groups by chance: only lists named for what a group has follow.
    """
    for key, value in state.items():
        entries = cast("list[Any]", value) if isinstance(value, list) else None
        if entries is None:
            continue
        if key == INNER_SCHEDULERS:
            for inner in entries:
                regroup(cast("dict[str, Any]", inner) if isinstance(inner, dict) else vars(inner), size, came_from)
        elif len(entries) == size and key.endswith(_PER_GROUP):
            state[key] = [entries[index] for index in came_from]
