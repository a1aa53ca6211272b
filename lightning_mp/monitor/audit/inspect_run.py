"""Where a run keeps what an audit looks at: modules under their user's names, optimizer state; and one pass of none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.compat.deepspeed import partitions
from lightning_mp.modules.patterns import plain_name
from lightning_mp.monitor.audit.judge import Declaration
from lightning_mp.monitor.audit.observer import Observed, Watch, note_gradients
from lightning_mp.monitor.side_run import loss_of, output_in, untouched
from lightning_mp.numerics.device import set_tf32
from lightning_mp.numerics.dtypes import dtype_name
from lightning_mp.numerics.nested import floating_in


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


def one_pass(
    modules: Mapping[str, nn.Module], batch: Any, declaration: Declaration, device: torch.device
) -> dict[str, Observed]:
    """What is seen while ``batch`` goes forward and backward as declared; the module is as before afterwards."""
    watch, module = Watch(modules), modules[""]
    with ExitStack() as stack:
        stack.enter_context(untouched(module, device))
        if declaration.tf32 is not None:
            stack.callback(set_tf32("high" if declaration.tf32 else "highest"))
        watch.start()
        stack.callback(watch.stop)
        stack.enter_context(watch)
        autocast = declaration.compute if declaration.autocast else None
        loss = _scalar(output_in(module, batch, device, autocast=autocast, storage=declaration.storage))
        if loss is not None and loss.requires_grad:
            loss.backward()
        note_gradients(watch.seen, modules)
    return watch.seen


def _scalar(output: Any) -> Tensor | None:
    """The loss in ``output``, or the sum of its floating tensors."""
    loss = loss_of(output)
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss
    summed = [tensor.float().sum() for tensor in floating_in(output)]
    return sum(summed[1:], summed[0]) if summed else None
