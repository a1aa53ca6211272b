"""Param groups of one dtype each, for engines that flatten a group into one tensor, and schedulers that keep up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.compat.torch import INNER_SCHEDULERS

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
