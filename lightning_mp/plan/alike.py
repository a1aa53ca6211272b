"""That ranks have the same plan and the same module, compared before a strategy's first collective on either."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_mp.compat.torch_sharding import FSDP1_ROOT, left_out_by_ddp
from lightning_mp.errors import Fault, Faults


@dataclass(frozen=True, slots=True)
class Rank:
    """What a rank is about to run; ``device`` is not compared, and told where ``auto`` was decided by it."""

    plan: str
    tensors: list[str]
    faults: list[Fault]
    device: str = field(repr=False)


def compare(plan: str, auto_on: str, module: nn.Module, device: torch.device, faults: Faults) -> None:
    """Note on every rank, in place of what each noted by itself, where they differ; called by all of them.

    ``plan`` is the resolved one, ``auto_on`` the device that decided it. One device sync, where ranks are alike.
    """
    if not dist.is_initialized():  # a plan that is checked without a run
        return
    mine = Rank(plan, list(_described(module)), faults.found, auto_on)
    ranks = apart(hashlib.sha256(repr(mine).encode()).digest(), device, mine=mine)
    if ranks:  # what a rank cannot run may follow from another plan or module
        faults.found[:] = _plans(ranks) or _modules(type(module).__name__, ranks) or _faults(ranks)


def apart(numbers: Iterable[int], device: torch.device, group: Any = None, *, mine: Any = None) -> list[Any]:
    """What each rank has, its ``numbers`` or what it gives as ``mine``, if ranks have other numbers; else nothing.

    Where they are alike, one collective and one device sync.
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
    left_out, pieces = left_out_by_ddp(module), FSDP1_ROOT in vars(module)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if name not in left_out:
            trained = "trained" if tensor.requires_grad else "frozen"
            kind = trained if isinstance(tensor, nn.Parameter) else "a buffer"
            shape = "" if pieces else f" of {'no shape yet' if is_lazy(tensor) else tuple(tensor.shape)}"
            meta = " on the meta device" if tensor.is_meta else ""
            yield f"{name!r}{shape} in {str(tensor.dtype).removeprefix('torch.')}{meta}, {kind},"


def _plans(ranks: Sequence[Rank]) -> list[Fault]:
    if len({rank.plan for rank in ranks}) == 1:
        return []
    shown = _by_rank([f"{rank.plan} for {rank.device}" if rank.device else rank.plan for rank in ranks])
    if any(rank.device for rank in ranks):
        given = f"precision='auto' differs between ranks: it is {shown}"
        return [Fault(given, fix="give every rank the one that all of these devices can run")]
    return [Fault(f"the plan differs between ranks: {shown}", fix="give every rank the same")]


def _modules(name: str, ranks: Sequence[Rank]) -> list[Fault]:
    for places in zip_longest(*(rank.tensors for rank in ranks), fillvalue="nothing more"):
        if len(set(places)) > 1:
            given = f"{name} differs between ranks: it has {_by_rank(places)}"
            return [Fault(given, fix="make the same module on every rank, and freeze the same parameters")]
    return []


def _faults(ranks: Sequence[Rank]) -> list[Fault]:
    merged: list[Fault] = []
    for fault in dict.fromkeys(fault for rank in ranks for fault in rank.faults):
        holding = [number for number, rank in enumerate(ranks) if fault in rank.faults]
        everywhere = len(holding) == len(ranks)
        merged.append(fault if everywhere else replace(fault, problem=f"{fault.problem}, on {_named(holding)}"))
    return merged


def _by_rank(values: Sequence[str]) -> str:
    numbers: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        numbers.setdefault(value, []).append(number)
    return "; ".join(f"{value} on {_named(held)}" for value, held in numbers.items())


def _named(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - 4} others" if len(numbers) > 4 else ""
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:4]))}{more}"
