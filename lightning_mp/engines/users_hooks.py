"""Which hooks of the user's a step passes through."""

from __future__ import annotations

from typing import Any, cast

from lightning_mp.compat.lightning import Callback, LightningModule, is_overridden


def may_change_gradients(module: LightningModule) -> bool:
    """Whether a hook between the unscaling and the step may leave gradients that are not finite.

    This package's own callbacks read, or take gradients away; the plan's clipping leaves finite ones finite.
    """
    if any(is_overridden(name, module, LightningModule) for name in _HOOKS):
        return True
    callbacks: list[Callback] = cast("Any", module.trainer).callbacks
    theirs = (callback for callback in callbacks if not type(callback).__module__.startswith(_OURS))
    return any(is_overridden(_HOOKS[0], callback, Callback) for callback in theirs)


_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
_OURS = __name__.partition(".")[0] + "."
