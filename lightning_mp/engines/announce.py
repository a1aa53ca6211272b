"""What a fit begins with: the plan in a few lines of the log, and in every logger's hyperparameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn

from lightning_mp.compat.lightning import Trainer, rank_zero_info
from lightning_mp.modules.describe import announcement
from lightning_mp.policy import PrecisionPolicy


def announce(policy: PrecisionPolicy, module: nn.Module, trainer: Trainer) -> None:
    """Say on rank 0 what is declared, and give it to the loggers, so that runs can be filtered by it."""
    for line in announcement(policy, module):
        rank_zero_info(line)
    for logger in trainer.loggers:
        logger.log_hyperparams(hyperparameters(policy))


def hyperparameters(policy: PrecisionPolicy) -> dict[str, Any]:
    """The policy as one flat mapping: ``precision_plan/loss_scaling/init_scale`` and so on; pins as one string."""
    values = policy.to_dict() | {"pins": str({pin.pattern: pin.dtype for pin in policy.pins})}
    return dict(_flat("precision_plan", values))


def _flat(name: str, value: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, str(value) if isinstance(value, list) else value
        return
    for key, item in cast("Mapping[str, Any]", value).items():
        yield from _flat(f"{name}/{key}", item)
