"""Norms and losses in half precision, and the epsilons that vanish there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lightning_mp.compat.torch import is_loss
from lightning_mp.modules.class_swap import original_class
from lightning_mp.monitor.advice import pinning
from lightning_mp.monitor.doctor.case import HALF, Case, listed, many
from lightning_mp.monitor.doctor.probe import reduces_in_half
from lightning_mp.monitor.findings import Finding
from lightning_mp.numerics.dtypes import to_torch

_EPS = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True, slots=True)
class HalfNorm:
    """A norm, or a loss, whose sums are over half-precision numbers."""

    name: str
    module: nn.Module
    dtype: str

    @property
    def kind(self) -> str:
        """The name of its class."""
        return original_class(self.module).__name__


def in_half(case: Case) -> Iterator[Finding]:
    """Norms and losses that would run in half precision."""
    norms, losses = list(half_norms(case)), list(_half_losses(case))
    found = norms + losses
    if not found:
        return
    kinds = list(dict.fromkeys(member.kind for member in found))
    names = listed([member.name for member in found])
    counts = [many(len(norms), "norm")] if norms else []
    counts += [many(len(losses), "loss module")] if losses else []
    yield Finding(
        name="norm_in_half",
        severity="warning",
        what=f"{' and '.join(counts)} ({', '.join(kinds)}) in {found[0].dtype}: {names}",
        why=_why(case, found),
        fix=f"pin them: {pinning(kinds, under_plan=case.policy is not None)}",
        where=found[0].name or None,
    )


def _why(case: Case, found: list[HalfNorm]) -> str:
    if any(case.pinned.get(id(member.module)) in HALF for member in found):
        return "a pin says so; sums over many numbers lose bits, and in fp16 squares above 65504 are infinite"
    if case.mixed:
        return "autocast runs no operation of theirs in fp32, and they do not cast their input themselves"
    return f"{case.precision} stores and computes everything in half precision: sums lose bits"


def eps_underflows(case: Case) -> Iterator[Finding]:
    """Norms in fp16 whose epsilon is 0 there."""
    found: dict[str, float] = {}
    kinds: list[str] = []
    for member in half_norms(case):
        eps = next((value for key in _EPS if isinstance(value := getattr(member.module, key, None), float)), 0.0)
        if eps > 0 and torch.tensor(eps, dtype=to_torch(member.dtype)).item() == 0:
            found[member.name] = eps
            kinds.append(member.kind)
    if found:
        eps = min(found.values())
        yield Finding(
            name="eps_underflows",
            severity="warning",
            what=f"eps={eps!r} is 0 in fp16, in {many(len(found), 'norm')}: {listed(found)}",
            why="for equal inputs (padding) the variance is 0: the output divides by 0, or its gradient exceeds 65504",
            fix=f"set eps=1e-5, or pin them: {pinning(dict.fromkeys(kinds), under_plan=case.policy is not None)}",
            where=next(iter(found)) or None,
        )


def half_norms(case: Case) -> Iterator[HalfNorm]:
    """Every norm that would run in half precision."""
    probed: dict[tuple[type[nn.Module], str, str], bool] = {}
    for name, module in case.modules:
        if not _is_norm(module):
            continue
        first = next(iter(module.parameters(recurse=False)), None)
        pin = case.pinned.get(id(module))
        stored = pin or case.storage or ("fp32" if first is None else case.stored(first))
        given = pin or (case.compute if case.mixed else stored)
        if given not in HALF:
            continue
        if _is_torchs(module):
            if stored in HALF:  # beside fp32 weights torch's kernels sum in fp32
                yield HalfNorm(name, module, stored)
            continue
        key = original_class(module), stored, given
        if key not in probed:
            autocast = case.device.type if case.mixed and pin is None else None
            probed[key] = reduces_in_half(module, stored=stored, given=given, autocast=autocast)
        if probed[key]:
            yield HalfNorm(name, module, given)


def _half_losses(case: Case) -> Iterator[HalfNorm]:
    """Loss modules; autocast runs torch's losses in fp32, the true modes do not."""
    for name, module in case.modules:
        if is_loss(module):
            dtype = case.pinned.get(id(module)) or (case.storage if not case.mixed else None)
            if dtype in HALF:
                yield HalfNorm(name, module, dtype)


def _is_norm(module: nn.Module) -> bool:
    return "norm" in original_class(module).__name__.lower() and next(module.children(), None) is None


def _is_torchs(module: nn.Module) -> bool:
    return original_class(module).forward.__module__.startswith("torch.nn.")
