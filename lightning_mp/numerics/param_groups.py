"""Param groups of one dtype each, for engines that flatten a group into one tensor, and schedulers that keep up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer


def split_by_dtype(optimizer: Optimizer, scheduler: Any) -> list[int]:
    """Split groups that hold several dtypes, in place; for each new group, the index of the one it came from.

    fp32 comes first: DeepSpeed takes the first parameter's dtype for that of the engine. A scheduler's lists of one
    entry a group follow.
    """
    pieces = [
        (index, dtype, [parameter for parameter in group["params"] if parameter.dtype == dtype])
        for index, group in enumerate(optimizer.param_groups)
        for dtype in dict.fromkeys(parameter.dtype for parameter in group["params"])
    ]
    pieces.sort(key=lambda piece: piece[1] != torch.float32)  # stable
    came_from = [index for index, _, _ in pieces]
    if came_from != list(range(len(optimizer.param_groups))):
        groups = [{**optimizer.param_groups[index], "params": members} for index, _, members in pieces]
        old = len(optimizer.param_groups)
        optimizer.param_groups[:] = groups
        if scheduler is not None:
            regroup(vars(scheduler), old, came_from)
    return came_from


def regroup(state: dict[str, Any], size: int, came_from: Sequence[int]) -> None:
    """Reorder a scheduler's lists of ``size`` entries, one a group: group ``i`` gets that of ``came_from[i]``."""
    for key, value in state.items():
        entries = cast("list[Any]", value) if isinstance(value, list) else None
        if key == "_schedulers":
            for inner in entries or ():
                regroup(cast("dict[str, Any]", inner) if isinstance(inner, dict) else vars(inner), size, came_from)
        elif entries is not None and len(entries) == size and key != "_milestones":
            state[key] = [entries[index] for index in came_from]
