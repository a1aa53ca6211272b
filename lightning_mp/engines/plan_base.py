"""What monitors and people may read of a ``MixedPrecisionPlan``, which lives on a floor above."""

from __future__ import annotations

import weakref
from typing import Any, cast

from torch import Tensor, nn

from lightning_mp.compat.lightning import Trainer
from lightning_mp.engines import for_strategy
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import Fault, PlanError
from lightning_mp.modules import describe
from lightning_mp.modules.fp8 import Conversion, FP8Layer
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import PrecisionPolicy

#: the keys under which stock Lightning's plugins keep a GradScaler's state
_STOCK_KEYS = ("MixedPrecision", "FSDPPrecision")

IN_FABRIC = Fault(
    "Fabric(plugins=[MixedPrecisionPlan(...)]), or a backward pass without a Trainer",
    "Trainer(plugins=[plan]): a plan follows the hooks of a Trainer's step",
    "use a Trainer, or Fabric(precision=...) without the plan",
)
AMONG_CALLBACKS = Fault("callbacks=[MixedPrecisionPlan(...)]", "plugins=[plan]", "write Trainer(plugins=[plan])")
OUTSIDE_OF_A_RUN = Fault(
    "an optimizer step outside of a run, as trainer.fit_loop makes one after fit",
    "steps within trainer.fit, which attaches the plan to the model and takes it off at its end",
    "call trainer.fit(...) again",
)


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
    #: the plan that this one is a deep copy of; of the original, the copy that ran last while it ran nothing itself
    _original: weakref.ref[Any] | None = None
    _latest: PlanBase | None = None
    _ran = False

    @property
    def _counted(self) -> StepCounter:
        """The counts of its own run, or of its deep copy's, as packages make one of their arguments."""
        copied = None if self._ran else self._latest
        return self.step_counter if copied is None else copied._counted

    @property
    def fp8_layers(self) -> list[FP8Layer]:
        """Under ``"fp8-mixed"``, once a run began: every Linear and Conv1D, converted or left with the reason."""
        return [] if self._fp8 is None else list(self._fp8.layers)

    @property
    def step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped; the first question after a step is a device sync."""
        return self._counted.step_skipped

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped since the run began."""
        return self._counted.skipped_steps

    @property
    def applied_steps(self) -> int:
        """How many optimizer steps were applied since the run began."""
        return self._counted.applied_steps

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

    def state_dict(self) -> dict[str, Any]:
        """The policy, the counts and the loss scale; plain values only."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {"policy": self._declared.to_dict(), "steps": self.step_counter.state_dict(), **scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from counts and loss scale; the policy stays the one declared now."""
        self.step_counter.load_state_dict(state_dict["steps"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict.get("scaler", {}))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adopt the scale of a checkpoint that stock Lightning wrote under ``16-mixed``."""
        if self.scaler is None or type(self).__qualname__ in checkpoint:
            return
        for key in _STOCK_KEYS:
            if "scale" in checkpoint.get(key, {}):
                self.scaler.load_state_dict(checkpoint[key])

    @property
    def state_key(self) -> str:
        """What a Trainer asks its callbacks for: always a ``PlanError``."""
        raise PlanError([AMONG_CALLBACKS], "Trainer")

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
