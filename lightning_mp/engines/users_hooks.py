"""Which hooks of the user's a step passes through."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_mp.compat.lightning import Callback, LightningModule, is_overridden
from lightning_mp.compat.torch import follows_step_hooks
from lightning_mp.engines import reduce
from lightning_mp.numerics import grads
from lightning_mp.numerics.found_inf import FoundInf


def may_change_gradients(module: LightningModule) -> bool:
    """Whether a hook between the unscaling and the step may leave gradients that are not finite.

    This package's own callbacks read, or take gradients away; the plan's clipping leaves finite ones finite.
    """
    if any(_is_overridden(name, module, LightningModule) for name in _HOOKS):
        return True
    callbacks: list[Callback] = cast("Any", module.trainer).callbacks
    theirs = (callback for callback in callbacks if not type(callback).__module__.startswith(_OURS))
    return any(_is_overridden(_HOOKS[0], callback, Callback) for callback in theirs)


def _is_overridden(name: str, instance: Any, parent: type) -> bool:
    # In every step: where the class has its parent's own function there is nothing to unwrap and compare.
    if getattr(type(instance), name, None) is getattr(parent, name) and name not in vars(instance):
        return False
    return is_overridden(name, instance, parent)


def precede_a_step(ours: Iterable[tuple[Optimizer, RemovableHandle]], device: torch.device, distributed: bool) -> bool:
    """Whether on some rank the user's own hooks run before an optimizer's step, as of now; ``ours`` then come last."""
    found = True in [follows_step_hooks(*one) for one in ours]  # of all, since each is moved
    if not distributed:
        return found
    flag = torch.tensor(float(found), device=device)
    reduce.max_over_ranks_(flag)
    return bool(flag)


def look_after_them(optimizer: Optimizer, flags: FoundInf) -> None:
    """In the last hook before a step: look at the gradients once more, and hold the step back on every rank."""
    flag = flags.last
    grads.unscale_and_check_(grads.gradients(grads.parameters_of(optimizer)), torch.ones_like(flag), flag)
    flags.reduce_(flag)
    flags.begin_step(flag)
    if not hasattr(optimizer, "found_inf") and flags.read(flag):  # else it takes the flag on the device
        grads.drop(optimizer)


_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
_OURS = __name__.partition(".")[0] + "."
