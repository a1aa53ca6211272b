"""Which modules of a model are sharded, gathered and reduced as one: its blocks, its pinned modules, and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mp.compat.transformers import block_classes
from lightning_mp.errors import Faults
from lightning_mp.modules.class_swap import original_class
from lightning_mp.modules.patterns import called_in, has_own_forward, matches, named_submodules, no_match
from lightning_mp.modules.pins import PinMap

#: what makes a module a unit where nothing else says so: torch.distributed.fsdp.wrap.size_based_auto_wrap_policy's
SIZE_OF_A_UNIT = 100_000_000

#: tells the dtype a parameter will be stored in
Stored = Callable[[Tensor], torch.dtype]
Wrap = str | type[nn.Module] | Sequence[str | type[nn.Module]] | None


@dataclass(frozen=True, slots=True)
class Units:
    """A model cut into shard units, inner ones first; the root takes what no other unit has."""

    #: repeated blocks, in forward order: what is compiled
    blocks: tuple[nn.Module, ...]
    #: blocks and pinned modules, inner ones first, without the root
    inner: tuple[nn.Module, ...]


def units(
    root: nn.Module, wrap: Wrap, pin_map: PinMap, stored: Stored, faults: Faults, *, together: str | None = None
) -> Units:
    """Cut ``root`` into units without changing anything.

    ``wrap`` are module classes, their names, or patterns; ``None`` takes transformers' ``_no_split_modules``, else
    modules of 100M parameters. ``stored`` tells the dtype a parameter will be stored in. What is pinned to ``together``
    stays in the unit around it. Patterns that match nothing and units that would hold two dtypes are noted in
    ``faults``.
    """
    blocks = _blocks(root, wrap, faults)
    apart = [member.module for member in pin_map.members if member.entry and member.pin.dtype != together]
    # A unit is gathered when it is called, and code may iterate over a Sequential without calling it.
    called = {id(one): one for module in apart for one in called_in(module, through_sequential=True)}
    # an attention reads its children's weights without calling them, so that no hook of theirs would gather
    attentions = [module for module in root.modules() if isinstance(module, nn.MultiheadAttention)]
    read = {id(child) for attention in attentions for child in attention.children()}
    pinned = [module for key, module in called.items() if _can_be_unit(module) and key not in read]
    chosen = _keep_ties_together(root, blocks if wrap is not None else (), (*blocks, *pinned), faults)
    depth = {id(module): name.count(".") for name, module in named_submodules(root)}
    inner = sorted(chosen, key=lambda module: -depth[id(module)])
    _check_dtypes(root, inner, stored, faults)
    return Units(tuple(block for block in blocks if block in chosen), tuple(inner))


# ------------------------------------------------------------------ candidates


def _blocks(root: nn.Module, wrap: Wrap, faults: Faults) -> list[nn.Module]:
    if wrap is None:  # what transformers models name themselves
        present = {original_class(module).__name__ for module in root.modules()}
        given: Sequence[Any] = [n for m in root.modules() for n in block_classes(m) if n in present]
        if not given:
            return _by_size(root)
    else:
        given = [wrap] if isinstance(wrap, (str, type)) else list(wrap)
    found: list[nn.Module] = []
    for item in dict.fromkeys(given):
        matched = _matching(root, item)
        if not matched and wrap is not None:
            no_match(item if isinstance(item, str) else item.__name__, root, "wrap=", faults)
        found += matched
    return _in_order(root, found)


def _matching(root: nn.Module, item: str | type[nn.Module]) -> list[nn.Module]:
    """What ``item`` matches; of nested matches the outermost, and what a ``ModuleList`` or a ``Sequential`` holds."""
    found: dict[int, nn.Module] = {}
    covered: list[str] = []
    for name, module in named_submodules(root):
        cls = original_class(module)
        means = matches(item, name, module) if isinstance(item, str) else issubclass(cls, item)
        if not means or any(name.startswith(f"{above}.") for above in covered):
            continue
        covered.append(name)
        # A unit is gathered when it is called, and code may iterate over a Sequential without calling it.
        tops = module.children() if cls is nn.Sequential else (module,)
        inside = (called for top in tops for called in called_in(top))
        found.update((id(called), called) for called in inside if _can_be_unit(called))
    return list(found.values())


def _in_order(root: nn.Module, chosen: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules once, in definition order, which usually is the order they run in."""
    ids = set(map(id, chosen))
    return [module for module in root.modules() if id(module) in ids]


def _by_size(root: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []

    def left_over(module: nn.Module) -> int:
        inside = sum(left_over(child) for child in module.children())
        own = inside + sum(parameter.numel() for parameter in module.parameters(recurse=False))
        if own < SIZE_OF_A_UNIT or module is root or not has_own_forward(module):
            return own
        found.append(module)
        return 0

    left_over(root)
    return _in_order(root, found)


def _can_be_unit(module: nn.Module) -> bool:
    return has_own_forward(module) and any(True for _ in module.parameters())


# ------------------------------------------------------------------ ties and dtypes


def _unit_of_each(root: nn.Module, chosen: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """The unit that each module's own parameters fall to, by the module's name."""
    ids = {id(module) for module in chosen}
    owner: dict[str, nn.Module] = {"": root}
    for name, module in named_submodules(root):
        owner[name] = module if id(module) in ids else owner[name.rpartition(".")[0]]
    return owner


def _keep_ties_together(
    root: nn.Module, asked: Sequence[nn.Module], candidates: Sequence[nn.Module], faults: Faults
) -> list[nn.Module]:
    """Candidates less those that hold a weight some other unit holds as well, unless the user asked for them.

    A tied weight is one tensor and lives in one unit: a pinned module, or a block that transformers names (BERT's
    embeddings, whose table is its head), is then no unit, and its weights fall to the unit around it (in which their
    dtype is checked).
    """
    chosen = list({id(module): module for module in candidates}.values())
    fixed, names = set(map(id, asked)), {id(module): name for name, module in named_submodules(root)}
    while split := _split_ties(root, chosen):
        dropped = {id(module) for module in split} - fixed
        if not dropped:
            for unit in split:
                faults.add(
                    f"wrap= makes {names[id(unit)]!r} a shard unit, which shares a weight with another unit",
                    "wrap a module that holds all owners, or none of them",
                )
            break
        chosen = [module for module in chosen if id(module) not in dropped]
    return chosen


def _split_ties(root: nn.Module, chosen: Sequence[nn.Module]) -> list[nn.Module]:
    """Units other than the root that hold a parameter which another unit holds too."""
    owner = _unit_of_each(root, chosen)
    holders: dict[int, dict[int, nn.Module]] = {}
    for name, module in (("", root), *named_submodules(root)):
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), {})[id(owner[name])] = owner[name]
    found = {key: unit for units in holders.values() if len(units) > 1 for key, unit in units.items()}
    return [unit for unit in found.values() if unit is not root]


def _check_dtypes(root: nn.Module, inner: Sequence[nn.Module], stored: Stored, faults: Faults) -> None:
    """One unit is gathered and reduced as one: its trainable parameters share a dtype."""
    owner = _unit_of_each(root, inner)
    names: dict[int, str] = {id(module): name for name, module in named_submodules(root)}
    held: dict[int, dict[torch.dtype, str]] = {}
    for name, module in (("", root), *named_submodules(root)):
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and parameter.is_floating_point():
                dtypes = held.setdefault(id(owner[name]), {})
                dtypes.setdefault(stored(parameter), f"{name}.{key}".strip("."))
    for unit, dtypes in held.items():
        if len(dtypes) > 1:
            where = repr(names[unit]) if unit in names else "of the whole model"
            given = " and ".join(f"{place} in {str(dtype).removeprefix('torch.')}" for dtype, place in dtypes.items())
            faults.add(
                f"the shard unit {where} would hold two dtypes, and cannot be split: {given}",
                "pin a module that is called and shares no weight with others, or untie the weights "
                "(transformers: tie_word_embeddings=False)",
            )
