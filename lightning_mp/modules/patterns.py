"""Which modules a pattern means: the one place where names are matched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from lightning_mp.compat.torch import WRAPPERS
from lightning_mp.errors import Faults, did_you_mean
from lightning_mp.modules.class_swap import original_class

#: the word for every normalization; also a pattern like any other
NORMS = "norms"
#: in the name of a class: not those that normalize weights, as weight_norm does, or inputs, as transforms do
_NORM = re.compile(r"(?<!Weight)(?<!Spectral)Norm(?!aliz)")


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a LayerNorm, BatchNorm, GroupNorm or RMSNorm of any class: one that only normalizes."""
    named = any(_NORM.search(cls.__name__) for cls in original_class(module).__mro__)
    own = sum(1 for _ in module.parameters(recurse=False)) + sum(1 for _ in module.buffers(recurse=False))
    if not named or not (own or original_class(module).__module__.startswith("torch.nn.")):
        return False
    return all(is_norm(child) or next(child.parameters(), None) is None for child in module.children())


def matches(pattern: str, name: str, module: nn.Module) -> bool:
    """Whether ``pattern`` means the module: by its name, a dotted suffix of it, or its class (case-sensitive fnmatch).

    The word ``norms`` means every normalization too.
    """
    if pattern == NORMS and is_norm(module):
        return True
    parts = name.split(".")
    suffixes = (".".join(parts[start:]) for start in range(len(parts)))
    return any(fnmatchcase(suffix, pattern) for suffix in suffixes) or fnmatchcase(
        original_class(module).__name__, pattern
    )


def named_submodules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module below ``root`` under every one of its names, in definition order."""
    for name, module in root.named_modules(remove_duplicate=False):
        if name:
            yield name, module


#: the name of a module, itself, and the name of a parameter in it
Place = tuple[str, nn.Module, str]


def owners(root: nn.Module) -> dict[int, list[Place]]:
    """``id`` of every parameter → all places it is reached by, those of the root itself under the name ``""``."""
    found: dict[int, list[Place]] = {}
    for name, module in root.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append((name, module, key))
    return found


def has_own_forward(module: nn.Module) -> bool:
    """Whether calling the module means anything; a ``ModuleList`` only holds others."""
    return _forward(module) is not nn.Module.forward


def _forward(module: nn.Module) -> Any:
    return None if isinstance(module, torch.jit.ScriptModule) else original_class(module).forward


def called_in(module: nn.Module, *, through_sequential: bool = False) -> Iterator[nn.Module]:
    """The module itself where it has a forward; else the outermost below it that have one.

    ``through_sequential``: what is in a ``Sequential``, which is called however that one is used.
    """
    if has_own_forward(module) and not (through_sequential and _forward(module) is nn.Sequential.forward):
        yield module
        return
    for child in module.children():
        yield from called_in(child, through_sequential=through_sequential)


def not_scripted(name: str, module: nn.Module, what: str, faults: Faults) -> None:
    """Note that ``module``, whose forward is to be replaced, is compiled by ``torch.jit``, which never calls it."""
    if isinstance(module, torch.jit.ScriptModule):
        faults.add(f"{what} on {name!r}, which torch.jit compiled", "", "leave it out, or script it after training")


def no_match(pattern: str, root: nn.Module, what: str, faults: Faults) -> None:
    """Note that ``pattern`` matches nothing in ``root``, with the names most like it."""
    words = dict.fromkeys(word for name, module in named_submodules(root) for word in _words(name, module))
    here = f"choose among the modules here: {', '.join(list(words)[:5])}"
    fix = did_you_mean(pattern.strip("*."), words, here)
    if "SyncBatchNorm" in words and any(fnmatchcase(f"BatchNorm{size}d", pattern) for size in (1, 2, 3)):
        fix = (
            "use strategy='mp_ddp', where sync_batchnorm=True leaves batch norms their class, or write 'SyncBatchNorm'"
        )
    faults.add(f"{what} {pattern!r}, which matches no module", "a module's name, a suffix of it, or its class", fix)


def _words(name: str, module: nn.Module) -> tuple[str, ...]:
    return name.rpartition(".")[2], original_class(module).__name__, name


def plain_name(name: str) -> str:
    """``name`` without the parts that FSDP, ``torch.compile``, Fabric and checkpoint wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
