"""Overrides of methods, by which schedulers and weight averages stay unchanged on skipped steps.

``may_change_gradients`` says if the user's hooks change gradients before the step.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import MethodType
from typing import Any, cast

from lightning_mp.compat.lightning import Callback, LightningModule, Trainer, WeightAveraging, is_overridden

Skipped = Callable[[], bool]
_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
_OURS = __name__.partition(".")[0] + "."


def may_change_gradients(module: LightningModule) -> bool:
    """True if a hook of the user's runs between unscaling and the step, where gradients may change.

    Hooks of the module and of callbacks count. Callbacks of this package do not.
    """
    if any(is_overridden(name, module, LightningModule) for name in _HOOKS):
        return True
    callbacks: list[Callback] = cast("Any", module.trainer).callbacks
    theirs = (callback for callback in callbacks if not type(callback).__module__.startswith(_OURS))
    return any(is_overridden(_HOOKS[0], callback, Callback) for callback in theirs)


class Override:
    """A replacement for a method of one instance, until ``remove`` is called.

    ``instead`` is called with the original method and the arguments. After ``remove`` the original
    is called. Several overrides may be stacked. A copied or unpickled instance has its class's
    method.
    """

    def __init__(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        self.owner, self.name, self.active, self._instead = owner, name, True, instead
        #: the instance's earlier attribute of that name; ``None`` if it was the class's method
        self.before = owner.__dict__.get(name)
        owner.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        original = self.before or partial(getattr(type(self.owner), self.name), self.owner)
        return self._instead(original, *args, **kwargs) if self.active else original(*args, **kwargs)

    @property
    def __wrapped__(self) -> Any:
        """Return the method under all overrides. Lightning's ``is_overridden`` inspects it."""
        if isinstance(self.before, Override):
            return self.before.__wrapped__
        return self.before or getattr(type(self.owner), self.name)

    def remove(self) -> None:
        """Stop the replacement, and restore the attribute.

        An active override above this one stays in place.
        """
        self.active = False
        top = self.owner.__dict__.pop(self.name, None)
        while isinstance(top, Override) and not top.active:
            top = top.before
        if top is not None:
            self.owner.__dict__[self.name] = top

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.owner))
        return self if copied is None else MethodType(getattr(type(copied), self.name), copied)

    def __reduce__(self) -> Any:
        return getattr, (self.owner, self.name)  # the unpickled owner has its class's method


def hold_on_skips(trainer: Trainer, module: LightningModule, skipped: Skipped) -> Callable[[], None]:
    """Keep schedulers and weight averages from advancing on a step for which ``skipped()`` is True.

    Only schedulers with ``interval="step"`` are held. A ``WeightAveraging`` callback is held in
    updates after steps, not after epochs. Return a function that undoes this.

    The override is on the module's hook and not on the scheduler's ``step``. So schedulers can be
    saved, and callbacks find them unchanged.
    """
    undo = ExitStack()

    def step(original: Any, scheduler: Any, metric: Any) -> None:
        interval = next((c.interval for c in trainer.lr_scheduler_configs if c.scheduler is scheduler), None)
        if interval != "step" or not skipped():
            original(scheduler, metric)

    def should_update(original: Any, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        wanted = original(step_idx=step_idx, epoch_idx=epoch_idx)
        return wanted and not (step_idx is not None and skipped())

    undo.callback(Override(module, "lr_scheduler_step", step).remove)
    for callback in cast("list[Any]", trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, WeightAveraging):
            undo.callback(Override(callback, "should_update", should_update).remove)
    return undo.close
