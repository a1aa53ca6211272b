"""What monitors and people may read of a ``MixedPrecisionPlan``, and what a fit under it begins and ends with."""

from __future__ import annotations

import weakref
from typing import Any, cast

from torch import Tensor, nn

from lightning_mp.compat.lightning import Trainer, TrainerFn, rank_zero_info, rank_zero_warn
from lightning_mp.engines import for_strategy
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import PlanError
from lightning_mp.modules import describe
from lightning_mp.modules.fp8 import Conversion, FP8Layer
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.policy import PrecisionPolicy

#: the keys under which stock Lightning's plugins keep a GradScaler's state
_STOCK_KEYS = ("MixedPrecision", "FSDPPrecision")

#: fp16's smallest normal number is 2**-14, and half of its smallest one, 2**-25, is rounded to 0
IN_FP16 = (
    "16-true divides gradients by the loss scale in fp16: below 6e-5 they lose bits, below 3e-8 they become 0; "
    "'16-mixed' has them in fp32"
)


class PlanBase:
    """The base class by which a precision plugin is known to be a plan."""

    policy: PrecisionPolicy
    _declared: PrecisionPolicy
    #: the loss scale and the counts of applied and skipped steps; disabled in a mode without loss scaling
    loss_scaler: LossScaler
    #: the same; ``None`` in a mode without loss scaling
    scaler: LossScaler | None
    #: what carries the plan out on the strategy at hand, while a run lasts
    engine: StepEngine | None = None
    _trainer: weakref.ref[Trainer] | None = None
    _fp8: Conversion | None = None
    #: the plan that this one is a deep copy of; of the original, the copy that ran last while it ran nothing itself
    _original: weakref.ref[Any] | None = None
    _latest: PlanBase | None = None
    _ran = False

    @property
    def _counted(self) -> LossScaler:
        """The counts of its own run, or of its deep copy's, as packages make one of their arguments."""
        copied = None if self._ran else self._latest
        return self.loss_scaler if copied is None else copied._counted

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
    def trainer(self) -> Trainer | None:
        """The Trainer of the present run, or of the last one while it lives."""
        return None if self._trainer is None else self._trainer()

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last clipping by norm, before it: an fp32 scalar on the device."""
        return None if self.engine is None else self.engine.last_norm

    def same_as(self, other: object) -> bool:
        """Whether ``other`` is a plan of the same class that declares the same policy: either may run for the other."""
        return type(other) is type(self) and cast("PlanBase", other)._declared == self._declared

    def state_dict(self) -> dict[str, Any]:
        """The policy, the counts and the loss scale; plain values only."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        return {"policy": self._declared.to_dict(), "steps": self.loss_scaler.counts(), **scaler}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from counts and loss scale; the policy stays the one declared now."""
        self.loss_scaler.load_counts(state_dict["steps"])
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
        raise PlanError.of("callbacks=[MixedPrecisionPlan(...)]", "write Trainer(plugins=[plan])", "Trainer")

    def describe(self, module: nn.Module | None = None) -> str:
        """What is declared, as a table: what is stored, computed, reduced and kept in which dtype, and by what rules.

        With ``module``, or within a run, each pin and the checkpointing come with the modules they cover.
        """
        return describe.as_text(self._described(module))

    def _repr_html_(self) -> str:
        return describe.as_html(self._described(None))

    def _described(self, module: nn.Module | None) -> describe.Rows:
        trainer = None if self.engine is None else self.trainer
        if trainer is None:
            return describe.rows(self.policy, module)
        module = module or trainer.lightning_module
        return describe.rows(self.policy, module, for_strategy.describe(trainer.strategy), self.fp8_layers)


# ------------------------------------------------------------------ how a fit begins and ends


def began(engine: StepEngine, module: nn.Module, trainer: Trainer) -> None:
    """Say on rank 0 what is declared, and give it to the loggers, so that runs can be filtered by it."""
    for line in describe.announcement(engine.policy, module, () if engine.fp8 is None else engine.fp8.layers):
        rank_zero_info(line)
    if engine.policy.precision == "16-true":
        rank_zero_info(IN_FP16)
    for logger in trainer.loggers:
        # under one key, beside the module's own: loggers without nested names make precision_plan/loss_scaling of it
        pins = str({pin.pattern: pin.dtype for pin in engine.policy.pins})
        logger.log_hyperparams({"precision_plan": engine.policy.to_dict() | {"pins": pins}})


def ended(plan: PlanBase, trainer: Trainer | None) -> None:
    """Warn at the end of a fit that took steps and applied none of them."""
    fitted = trainer is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted
    tried = plan.loss_scaler.attempts if fitted and plan.engine is not None else 0
    if tried and not plan.applied_steps:
        scale = "" if plan.scaler is None else f"; the loss scale ended at {plan.scaler.get_scale():g}"
        rank_zero_warn(
            f"The run applied 0 of its {tried} optimizer steps: each was skipped, as a gradient was not finite{scale}. "
            "The weights are those it began with. nonfinite='raise' stops at the first such step and names its module"
        )
