"""What must stand still on a skipped step although Lightning moves it: step-interval schedulers, weight averages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer

Skipped = Callable[[], bool]


class _HeldSchedulerStep:
    """Stands in for ``lr_scheduler_step`` on one LightningModule instance; copies of the module get the plain one."""

    def __init__(self, module: LightningModule, skipped: Skipped) -> None:
        self._module, self._skipped = module, skipped
        self._own = module.__dict__.get("lr_scheduler_step")

    def __call__(self, scheduler: Any, metric: Any) -> None:
        trainer = self._module.trainer
        interval = next((c.interval for c in trainer.lr_scheduler_configs if c.scheduler is scheduler), None)
        if interval == "step" and self._skipped():
            return
        step = self._own or partial(type(self._module).lr_scheduler_step, self._module)
        step(scheduler, metric)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module))
        return self if copied is None else MethodType(type(copied).lr_scheduler_step, copied)

    def __reduce__(self) -> Any:
        return getattr, (self._module, "lr_scheduler_step")  # of the copy: by then it has its class's own


class Holding:
    """Holds schedulers and weight averages for one run; ``release`` takes everything out again.

    Shadowing the LightningModule's hook, rather than the scheduler's ``step``, keeps schedulers saveable and lets
    ``LearningRateMonitor`` see them as they are.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        #: whether ``hold`` was called since the last ``release``
        self.active = False

    def hold(self, trainer: Trainer, module: LightningModule, skipped: Skipped) -> None:
        """Hold every step-interval scheduler and every weight average of the trainer while ``skipped()`` is true."""
        self.active = True
        if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            self._shadow(module, "lr_scheduler_step", _HeldSchedulerStep(module, skipped))
        for callback in cast("list[Any]", trainer.callbacks):  # pyright: ignore[reportAttributeAccessIssue]
            if _averages_weights(callback):
                self._shadow(callback, "should_update", partial(_unless_skipped, callback.should_update, skipped))

    def release(self) -> None:
        """Undo every shadow."""
        self.active = False
        while self._undo:
            self._undo.pop()()

    def _shadow(self, owner: Any, name: str, stand_in: Any) -> None:
        before = owner.__dict__.get(name)
        owner.__dict__[name] = stand_in
        self._undo.append(partial(_put_back, owner, name, before))


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is None:
        owner.__dict__.pop(name, None)
    else:
        owner.__dict__[name] = before


def _averages_weights(callback: Any) -> bool:
    try:
        from lightning.pytorch.callbacks import WeightAveraging
    except ImportError:  # Lightning before 2.6
        return False
    return isinstance(callback, WeightAveraging)


def _unless_skipped(
    should_update: Callable[..., bool], skipped: Skipped, step_idx: int | None = None, epoch_idx: int | None = None
) -> bool:
    wanted = should_update(step_idx=step_idx, epoch_idx=epoch_idx)
    return wanted and not (step_idx is not None and skipped())
