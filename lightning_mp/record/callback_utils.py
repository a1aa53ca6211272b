"""Shared by the monitoring callbacks: which batches step an optimizer, a run's end, and its loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from lightning_mp.compat import require_versions
from lightning_mp.compat.lightning import Callback, LightningModule, Trainer, accumulates


class RunCallback(Callback):
    """A callback that gives up what belongs to a run when it is over or has failed; a copy has nothing of it."""

    #: the attributes that a copy (a spawned process, a sweep) does not take along
    _of_run: tuple[str, ...] = ()

    def _release(self, trainer: Trainer, error: BaseException | None = None) -> None:
        """Give up what belongs to the run, which has ended or failed; may be called again."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The run is over."""
        self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run has failed: Lightning calls no ``teardown`` of a callback then."""
        self._release(trainer, exception)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(self._of_run)}


class StepTracker:
    """Finds out from a callback's hooks in which training batches an optimizer steps, however it is stepped.

    A step is known by ``global_step`` as ``training_step`` sees it: the number of steps tried before it.
    """

    def __init__(self) -> None:
        require_versions("callbacks", "lightning")
        #: of the batch at hand
        self.step = 0
        self._pending = self._tried = False

    def batch_starts(self, trainer: Trainer) -> None:
        """For ``on_train_batch_start``."""
        self.step = trainer.global_step

    def backward(self) -> None:
        """For ``on_before_backward``: without one since the last step, ``training_step`` returned None."""
        self._pending = True

    def begins(self, trainer: Trainer) -> bool:
        """For ``on_before_optimizer_step``: whether an optimizer is really about to step, in training."""
        within_window = trainer.strategy.handles_gradient_accumulation and accumulates(trainer)
        if within_window or not (self._pending and trainer.training):
            return False
        if trainer.lightning_module.automatic_optimization:
            self._pending = False
        self._tried = True
        return True

    def batch_ends(self) -> bool:
        """For ``on_train_batch_end``: whether an optimizer stepped in the batch."""
        tried, self._tried = self._tried, False
        if tried:
            self._pending = False
        return tried


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The callbacks of a run."""
    return cast("Any", trainer).callbacks


def log(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    """Send ``values`` to every logger; ``step`` is :func:`logged_step` as it was when they were measured."""
    if values and trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(dict(values), step=step)
