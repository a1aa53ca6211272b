"""What a fit begins with, the plan in the log and in every logger's hyperparameters, and what it may end with."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_mp.compat.lightning import Trainer, TrainerFn, rank_zero_info, rank_zero_warn
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.modules.describe import announcement
from lightning_mp.policy import PrecisionPolicy


def began(engine: StepEngine, module: nn.Module, trainer: Trainer) -> None:
    """Say on rank 0 what is declared, and give it to the loggers, so that runs can be filtered by it."""
    for line in announcement(engine.policy, module, () if engine.fp8 is None else engine.fp8.layers):
        rank_zero_info(line)
    for logger in trainer.loggers:
        logger.log_hyperparams(hyperparameters(engine.policy))


def ended(plan: PlanBase, trainer: Trainer | None) -> None:
    """Warn at the end of a fit that took steps and applied none of them."""
    tried = plan.step_counter.attempts
    if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.interrupted or plan.engine is None:
        return
    if tried and not plan.applied_steps:
        rank_zero_warn(no_step_applied(tried, None if plan.scaler is None else plan.scaler.get_scale()))


def no_step_applied(tried: int, scale: float | None) -> str:
    """What to say at the end of a run all of whose ``tried`` steps were skipped."""
    ended = "" if scale is None else f"; the loss scale ended at {scale:g}"
    return (
        f"The run applied 0 of its {tried} optimizer steps: each was skipped, as a gradient was not finite{ended}. "
        "The weights are those it began with. nonfinite='raise' stops at the first such step and names its module"
    )


def hyperparameters(policy: PrecisionPolicy) -> dict[str, Any]:
    """The policy under one key, ``precision_plan``, beside the module's own; pins as one string.

    Loggers that have no nested names make ``precision_plan/loss_scaling/init_scale`` of it.
    """
    return {"precision_plan": policy.to_dict() | {"pins": str({pin.pattern: pin.dtype for pin in policy.pins})}}
