"""Shared by the monitoring callbacks: which batches step an optimizer, and the run's loggers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from lightning_mp.compat.checks import require_versions
from lightning_mp.compat.lightning import Callback, Trainer, accumulates


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
        """For ``on_before_optimizer_step``: whether an optimizer is really about to step."""
        if (trainer.strategy.handles_gradient_accumulation and accumulates(trainer)) or not self._pending:
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
