"""Hooks of Lightning in a step: which may change gradients, and what must not move where the step is skipped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

from lightning_mp.compat.lightning import Callback, LightningModule, Trainer, WeightAveraging, is_overridden

Skipped = Callable[[], bool]
_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")
_OURS = __name__.partition(".")[0] + "."


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


class _Override:
    """Overrides a method on one instance. Overrides may be stacked, and removed in any order."""

    def __init__(self, owner: Any, name: str, skipped: Skipped) -> None:
        self.owner, self.name = owner, name
        #: what the instance had under that name; ``None``: its class's own
        self.before = owner.__dict__.get(name)
        self._skipped: Skipped | None = skipped

    def skipped(self) -> bool:
        return self._skipped is not None and self._skipped()

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """What would run without it."""
        method = self.before or partial(getattr(type(self.owner), self.name), self.owner)
        return method(*args, **kwargs)

    def remove(self) -> None:
        """Skip nothing any more, and restore the attribute unless another override was put over this one."""
        self._skipped = None
        top = self.owner.__dict__.get(self.name)
        while isinstance(top, _Override) and top._skipped is None:
            top = top.before
        if top is None:
            self.owner.__dict__.pop(self.name, None)
        else:
            self.owner.__dict__[self.name] = top


class _SchedulerStep(_Override):
    """``lr_scheduler_step`` of one LightningModule instance, left out on a skip; copies of the module get their own."""

    def __init__(self, module: LightningModule, skipped: Skipped) -> None:
        super().__init__(module, "lr_scheduler_step", skipped)

    def __call__(self, scheduler: Any, metric: Any) -> None:
        configs = self.owner.trainer.lr_scheduler_configs
        interval = next((c.interval for c in configs if c.scheduler is scheduler), None)
        if interval == "step" and self.skipped():
            return
        self.original(scheduler, metric)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.owner))
        return self if copied is None else MethodType(type(copied).lr_scheduler_step, copied)

    def __reduce__(self) -> Any:
        return getattr, (self.owner, "lr_scheduler_step")  # of the copy: by then it has its class's own


class _ShouldUpdate(_Override):
    """``should_update`` of a callback that averages weights, false on a skipped step."""

    def __call__(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        wanted = self.original(step_idx=step_idx, epoch_idx=epoch_idx)
        return wanted and not (step_idx is not None and self.skipped())


class SkipAwareHooks:
    """Keeps schedulers and weight averages from moving on skipped steps of one run.

    Overriding the LightningModule's hook, rather than the scheduler's ``step``, keeps schedulers saveable and lets
    ``LearningRateMonitor`` see them as they are. Several instances may be installed in one run, and removed in any
    order.
    """

    def __init__(self) -> None:
        self._overrides: list[_Override] = []
        #: whether ``install`` was called since the last ``remove``
        self.active = False

    def install(self, trainer: Trainer, module: LightningModule, skipped: Skipped) -> None:
        """Leave step-interval schedulers and weight averages of the trainer as they are while ``skipped()`` is true."""
        self.active = True
        if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            self._overrides.append(_SchedulerStep(module, skipped))
        for callback in cast("list[Any]", trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]
            if isinstance(callback, WeightAveraging):
                self._overrides.append(_ShouldUpdate(callback, "should_update", skipped))
        for override in self._overrides:
            override.owner.__dict__[override.name] = override

    def remove(self) -> None:
        """Restore what was overridden."""
        self.active = False
        while self._overrides:
            self._overrides.pop().remove()
