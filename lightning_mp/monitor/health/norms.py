"""Norms of a step: of gradients, of parameters, and of what the step changed, whole or sharded.

Everything stays on the device. Squares of local shards are summed first, and then over ranks together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import matches, no_match, plain_name
from lightning_mp.monitor.health.shards import Shard
from lightning_mp.numerics.grad_norm import Groups, squares

#: of a larger local shard, so many evenly spaced pieces of so many elements are copied for the update ratio
PIECES, PIECE = 16, 1024


class SquareSums:
    """SquareSums of squares by name, to be added over ranks in one all-reduce for each set of process groups."""

    def __init__(self, device: torch.device, order: Iterable[Groups]) -> None:
        """``order`` is that of the all-reduces, which has to be the same on every rank."""
        self._device = device
        self._sums: dict[Groups, dict[str, Tensor]] = {groups: {} for groups in order}
        self._counts: set[str] = set()

    def add(
        self,
        shards: Sequence[Shard],
        names: Mapping[str, Collection[int] | None],
        divisor: Tensor | float | None = None,
    ) -> None:
        """Add the squares of ``shards`` (over ``divisor``) under each name, or of those at the name's places alone.

        Every rank has to add shards with the same process groups under the same names.
        """
        values = squares([shard.tensor for shard in shards], self._device)
        if divisor is not None:
            values = (values.sqrt() / divisor).square()  # a scale's square may be past fp32
        for groups in dict.fromkeys(shard.groups for shard in shards):
            places = {place for place, shard in enumerate(shards) if shard.groups == groups}
            sums = self._sums.setdefault(groups, {})
            for name, wanted in names.items():
                value = _sum_at(values, places if wanted is None else places.intersection(wanted))
                sums[name] = sums[name] + value if name in sums else value

    def add_size(self, shards: Sequence[Shard], name: str) -> None:
        """Add the number of elements under ``name``: 0 where no rank has any."""
        for groups in dict.fromkeys(shard.groups for shard in shards):
            size = sum(shard.tensor.numel() for shard in shards if shard.groups == groups)
            self.add_counts(groups, {name: torch.full((), float(size), dtype=torch.float32, device=self._device)})

    def add_counts(self, groups: Groups, counts: Mapping[str, Tensor]) -> None:
        """Add numbers that are added up over ``groups`` as they are."""
        self._counts.update(counts)
        sums = self._sums.setdefault(groups, {})
        for name, value in counts.items():
            sums[name] = sums[name] + value.float() if name in sums else value.float()

    def norms(self) -> dict[str, Tensor]:
        """The 2-norm, or the count, under every name: fp32 scalars on the device."""
        total: dict[str, Tensor] = {}
        for groups, sums in self._sums.items():
            if not sums:
                continue
            values = torch.stack(list(sums.values()))
            for group in groups:
                dist.all_reduce(values, group=group)
            for name, value in zip(sums, values, strict=True):
                total[name] = total[name] + value if name in total else value
        return {name: value if name in self._counts else value.sqrt() for name, value in total.items()}


def _sum_at(values: Tensor, places: Collection[int]) -> Tensor:
    if len(places) == len(values):
        return values.sum()
    return torch.stack([values[place] for place in sorted(places)]).sum() if places else values.new_zeros(())


class Snapshot:
    """The parameters before a step: all of a small one, evenly spaced pieces of a large one."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._before = _copied(shards)

    def add_before(self, sums: SquareSums, name: str) -> None:
        """Add the squares of the parameters as they were."""
        sums.add(list(self._before.values()), {name: None})

    def add_change(self, shards: Sequence[Shard], sums: SquareSums, name: str) -> None:
        """Add the squares of what has changed in ``shards`` since."""
        now = _copied(shards)
        for kind, shard in now.items():
            shard.tensor.sub_(self._before[kind].tensor)
        sums.add(list(now.values()), {name: None})


def _copied(shards: Sequence[Shard]) -> dict[object, Shard]:
    """Copies of the parameters, those of a kind behind each other in one tensor."""
    found: dict[tuple[Groups, torch.dtype, torch.device, int], list[Tensor]] = {}
    for tensor, groups in shards:
        kept = some(tensor)
        found.setdefault((groups, tensor.dtype, tensor.device, kept.dim()), []).append(kept)
    return {kind: Shard(torch.cat(members), kind[0]) for kind, members in found.items()}


def some(tensor: Tensor) -> Tensor:
    """All of a tensor, flat; of a large one :data:`PIECES` rows."""
    flat = tensor.reshape(-1)
    if flat.numel() <= PIECES * PIECE:
        return flat
    return flat.as_strided((PIECES, PIECE), (flat.numel() // PIECES, 1))


def named_parameters(root: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``root`` by the names they have without wrappers; a tied one once."""
    return {plain_name(name): parameter for name, parameter in root.named_parameters()}


def in_groups(root: nn.Module, groups: Mapping[str, str], faults: Faults) -> dict[str, set[str]]:
    """The names of the parameters in or below the modules that each pattern means.

    A pattern that matches nothing is noted in ``faults``.
    """
    modules = [(plain_name(name), module) for name, module in root.named_modules(remove_duplicate=False) if name]
    found: dict[str, set[str]] = {}
    for group, pattern in groups.items():
        chosen = [module for name, module in modules if matches(pattern, name, module)]
        if not chosen:
            no_match(pattern, root, f"group {group!r}:", faults)
        inside = {id(parameter) for module in chosen for parameter in module.parameters()}
        named = root.named_parameters(remove_duplicate=False)
        found[group] = {plain_name(name) for name, parameter in named if id(parameter) in inside}
    return found
