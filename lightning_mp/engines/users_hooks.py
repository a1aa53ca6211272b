"""Which hooks of the user's a step passes through."""

from __future__ import annotations

from typing import Any, cast

from lightning_mp.compat.lightning import Callback, LightningModule, is_overridden


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


_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
_OURS = __name__.partition(".")[0] + "."
