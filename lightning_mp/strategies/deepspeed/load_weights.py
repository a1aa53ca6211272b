"""Whole weights into ZeRO-3's partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_mp.compat.torch import load_own_tensors


def load_whole(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """``module.load_state_dict(state)``, one submodule gathered at a time; every rank has all of ``state``.

    Lightning's own way loads buffers on rank 0 alone, and says nothing of names that are missing or do not fit.

    Raises:
        RuntimeError: names are missing or unexpected and ``strict``, or shapes differ.
    """
    import deepspeed

    missing: list[str] = []
    unexpected: list[str] = []
    errors: list[str] = []
    waiting = [("", module)]
    while waiting:
        prefix, part = waiting.pop()
        with deepspeed.zero.GatheredParameters(list(part.parameters(recurse=False)), modifier_rank=0):
            load_own_tensors(part, state, prefix, missing, unexpected, errors)
        waiting += [(f"{prefix}{name}.", child) for name, child in part.named_children()]
    if strict and (missing or unexpected):
        errors.append(f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}")
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: " + "\n\t".join(errors))
