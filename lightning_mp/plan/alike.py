"""The check that ranks have the same plan and the same module, before a strategy's first collective."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_mp.compat.torch_sharding import FSDP1_ROOT
from lightning_mp.errors import Fault, Faults


def compare(plan: str, auto_on: str, module: nn.Module, device: torch.device, faults: Faults) -> None:
    """Compare plan, module and faults over ranks. A collective, which every rank has to call.

    If ranks differ, ``faults`` of every rank become the same: the difference, or the faults of all ranks. If they are
    equal, nothing changes, at the cost of one all-reduce and one device sync. ``plan`` is the resolved plan,
    ``auto_on`` the device for which ``auto`` was resolved.
    """
    if not dist.is_initialized():  # a plan that is checked without a run
        return
    mine = plan, list(_described(module)), faults.found
    where = f" for {auto_on}" if auto_on else ""
    ranks = apart(hashlib.sha256(repr(mine).encode()).digest(), device, mine=(*mine, where))
    if not ranks:
        return
    plans, tensors, noted, devices = zip(*ranks, strict=True)
    places = (place for place in zip_longest(*tensors, fillvalue="nothing more") if len(set(place)) > 1)
    # A rank's faults may follow from its different plan or module, which is then the only fault.
    if len(set(plans)) > 1:
        shown = _by_rank([f"{plan}{on}" for plan, on in zip(plans, devices, strict=True)])
        fix = "give every rank the same, not 'auto' where devices differ"
        faults.found[:] = [Fault(f"the plan differs between ranks: it is {shown}", fix=fix)]
    elif differing := next(places, None):
        given = f"{type(module).__name__} differs between ranks: it has {_by_rank(differing)}"
        faults.found[:] = [Fault(given, fix="make the same module on every rank, and freeze the same parameters")]
    else:
        holders = {fault: [rank for rank, own in enumerate(noted) if fault in own] for own in noted for fault in own}
        faults.found[:] = [
            fault if len(held) == len(noted) else replace(fault, problem=f"{fault.problem}, on rank {held[0]}")
            for fault, held in holders.items()
        ]


def apart(numbers: Iterable[int], device: torch.device, group: Any = None, *, mine: Any = None) -> list[Any]:
    """Return an empty list if all ranks have equal ``numbers``, else what each rank passed as ``mine``.

    Without ``mine`` it is the rank's numbers. A collective: one all-reduce and one device sync if ranks are equal, an
    all-gather of objects as well if not.
    """
    held = tuple(numbers)
    digest = hash(held) >> 1  # of integers: the same in every process
    both = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    ranks: list[Any] = [None] * dist.get_world_size(group) if sum(both.tolist()) else []
    if ranks:
        dist.all_gather_object(ranks, mine or held, group)
    return ranks


def _described(module: nn.Module) -> Iterator[str]:
    pieces = FSDP1_ROOT in vars(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        trained = "trained" if tensor.requires_grad else "frozen"
        kind = trained if isinstance(tensor, nn.Parameter) else "a buffer"
        shape = "" if pieces else f" of {'no shape yet' if is_lazy(tensor) else tuple(tensor.shape)}"
        meta = " on the meta device" if tensor.is_meta else ""
        yield f"{name!r}{shape} in {str(tensor.dtype).removeprefix('torch.')}{meta}, {kind},"


def _by_rank(values: Sequence[str]) -> str:
    return "; ".join(f"{value} on rank {values.index(value)}" for value in dict.fromkeys(values))
