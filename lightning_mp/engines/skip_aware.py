"""What must stand still on a skipped step although Lightning moves it: step-interval schedulers, weight averages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

from lightning_mp.compat.lightning import LightningModule, Trainer

Skipped = Callable[[], bool]


class _StandIn:
    """Stands in for a method on one instance. Another may be put before it, and taken out in any order."""

    def __init__(self, owner: Any, name: str, skipped: Skipped) -> None:
        self.owner, self.name = owner, name
        #: what the instance had under that name; ``None``: its class's own
        self.before = owner.__dict__.get(name)
        self._skipped: Skipped | None = skipped

    def skipped(self) -> bool:
        return self._skipped is not None and self._skipped()

    def shadowed(self, *args: Any, **kwargs: Any) -> Any:
        """What would run without it."""
        method = self.before or partial(getattr(type(self.owner), self.name), self.owner)
        return method(*args, **kwargs)

    def release(self) -> None:
        """Hold nothing any more, and give the name back unless another stands before this one."""
        self._skipped = None
        standing = self.owner.__dict__.get(self.name)
        while isinstance(standing, _StandIn) and standing._skipped is None:
            standing = standing.before
        if standing is None:
            self.owner.__dict__.pop(self.name, None)
        else:
            self.owner.__dict__[self.name] = standing


class _HeldSchedulerStep(_StandIn):
    """Stands in for ``lr_scheduler_step`` on one LightningModule instance; copies of the module get the plain one."""

    def __init__(self, module: LightningModule, skipped: Skipped) -> None:
        super().__init__(module, "lr_scheduler_step", skipped)

    def __call__(self, scheduler: Any, metric: Any) -> None:
        configs = self.owner.trainer.lr_scheduler_configs
        interval = next((c.interval for c in configs if c.scheduler is scheduler), None)
        if interval == "step" and self.skipped():
            return
        self.shadowed(scheduler, metric)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self.owner))
        return self if copied is None else MethodType(type(copied).lr_scheduler_step, copied)

    def __reduce__(self) -> Any:
        return getattr, (self.owner, "lr_scheduler_step")  # of the copy: by then it has its class's own


class _HeldUpdate(_StandIn):
    """Stands in for ``should_update`` of a callback that averages weights."""

    def __call__(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        wanted = self.shadowed(step_idx=step_idx, epoch_idx=epoch_idx)
        return wanted and not (step_idx is not None and self.skipped())


class Holding:
    """Holds schedulers and weight averages for one run; ``release`` takes everything out again.

    Shadowing the LightningModule's hook, rather than the scheduler's ``step``, keeps schedulers saveable and lets
    ``LearningRateMonitor`` see them as they are. Several may hold in one run, and release in any order.
    """

    def __init__(self) -> None:
        self._held: list[_StandIn] = []
        #: whether ``hold`` was called since the last ``release``
        self.active = False

    def hold(self, trainer: Trainer, module: LightningModule, skipped: Skipped) -> None:
        """Hold every step-interval scheduler and every weight average of the trainer while ``skipped()`` is true."""
        self.active = True
        if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            self._held.append(_HeldSchedulerStep(module, skipped))
        for callback in cast("list[Any]", trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]
            if _averages_weights(callback):
                self._held.append(_HeldUpdate(callback, "should_update", skipped))
        for stand_in in self._held:
            stand_in.owner.__dict__[stand_in.name] = stand_in

    def release(self) -> None:
        """Undo every shadow."""
        self.active = False
        while self._held:
            self._held.pop().release()


def _averages_weights(callback: Any) -> bool:
    try:
        from lightning_mp.compat.lightning import WeightAveraging
    except ImportError:  # Lightning before 2.6
        return False
    return isinstance(callback, WeightAveraging)
