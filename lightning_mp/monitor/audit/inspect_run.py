"""Where a run keeps what an audit looks at: modules under their user's names, optimizer state, other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.compat.deepspeed import partitions
from lightning_mp.modules.patterns import plain_name
from lightning_mp.monitor.audit.judge import Declaration
from lightning_mp.monitor.audit.observer import Observed
from lightning_mp.numerics.dtypes import dtype_name


@dataclass(frozen=True, slots=True)
class Record:
    """What a callback saw while steps ran, under what was declared then."""

    declaration: Declaration
    seen: dict[str, Observed]


def modules_of(root: nn.Module) -> dict[str, nn.Module]:
    """Every module under its plain name; of a wrapper and what it wraps the latter."""
    return {plain_name(name): module for name, module in root.named_modules()} | {"": root}


def states_of(optimizers: Iterable[Any]) -> dict[int, set[str]]:
    """Dtypes of optimizer state by ``id`` of the parameter; counts are left out."""
    found: dict[int, set[str]] = {}
    for optimizer in optimizers:
        for parameter, state in _states(optimizer):
            found.setdefault(id(parameter), set()).update(_kept(parameter, state))
    return found


def _states(optimizer: Any) -> Iterator[tuple[Tensor, Mapping[str, Any]]]:
    parts = partitions(optimizer)
    while hasattr(optimizer, "optimizer"):  # of DeepSpeed's, Apex's and their like the optimizer inside
        optimizer = optimizer.optimizer
    state: Mapping[Any, Any] = optimizer.state
    if not parts:
        yield from ((parameter, values) for parameter, values in state.items() if isinstance(parameter, Tensor))
    for parameters, flat in parts:
        yield from ((parameter, state.get(flat, {})) for parameter in parameters)


def _kept(parameter: Tensor, state: Mapping[str, Any]) -> Iterator[str]:
    for key, value in state.items():
        if not isinstance(value, Tensor) or not value.is_floating_point() or key == "step":
            continue
        if value.dim() or not parameter.dim():  # else a count or a coefficient
            yield dtype_name(value.dtype)


def from_all_ranks(seen: dict[str, Observed]) -> list[dict[str, Observed]]:
    """What each rank saw, on every rank; all have to call it."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return [seen]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, seen)
    return cast("list[dict[str, Observed]]", gathered)
