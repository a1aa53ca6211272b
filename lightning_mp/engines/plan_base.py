"""What monitors and people may read of a ``MixedPrecisionPlan``, which lives on a floor above."""

from __future__ import annotations

import weakref
from typing import cast

from torch import Tensor, nn

from lightning_mp.compat.lightning import Trainer
from lightning_mp.engines import for_strategy, misplaced
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import PlanError
from lightning_mp.modules import describe
from lightning_mp.modules.fp8 import Conversion, FP8Layer
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import PrecisionPolicy


class PlanBase:
    """The base class by which a precision plugin is known to be a plan."""

    policy: PrecisionPolicy
    _declared: PrecisionPolicy
    #: counts of applied and skipped steps
    step_counter: StepCounter
    #: ``None`` in a mode without loss scaling
    scaler: LossScaler | None
    _engine: StepEngine | None = None
    _trainer: weakref.ref[Trainer] | None = None
    _fp8: Conversion | None = None

    @property
    def fp8_layers(self) -> list[FP8Layer]:
        """Under ``"fp8-mixed"``, once a run began: every Linear and Conv1D, converted or left with the reason."""
        return [] if self._fp8 is None else list(self._fp8.layers)

    @property
    def step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped; the first question after a step waits for the device."""
        return self.step_counter.step_skipped

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped since the run began."""
        return self.step_counter.skipped_steps

    @property
    def applied_steps(self) -> int:
        """How many optimizer steps were applied since the run began."""
        return self.step_counter.applied_steps

    @property
    def engine(self) -> StepEngine | None:
        """What carries the plan out on the strategy at hand, while a run lasts."""
        return self._engine

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer of the present run, or of the last one while it lives."""
        return None if self._trainer is None else self._trainer()

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last clipping by norm, before it: an fp32 scalar on the device."""
        return None if self._engine is None else self._engine.last_norm

    def same_as(self, other: object) -> bool:
        """Whether ``other`` is a plan of the same class that declares the same policy: either may run for the other."""
        return type(other) is type(self) and cast("PlanBase", other)._declared == self._declared

    @property
    def state_key(self) -> str:
        """What a Trainer asks its callbacks for: always a ``PlanError``."""
        raise PlanError([misplaced.AMONG_CALLBACKS], "Trainer")

    def describe(self, module: nn.Module | None = None) -> str:
        """What is declared, as a table: what is stored, computed, reduced and kept in which dtype, and by what rules.

        With ``module``, or within a run, each pin and the checkpointing come with the modules they cover.
        """
        return describe.as_text(self._described(module))

    def _repr_html_(self) -> str:
        return describe.as_html(self._described(None))

    def _described(self, module: nn.Module | None) -> describe.Rows:
        trainer = None if self._engine is None else self.trainer
        if trainer is None:
            return describe.rows(self.policy, module)
        module = module or trainer.lightning_module
        return describe.rows(self.policy, module, for_strategy.describe(trainer.strategy), self.fp8_layers)
