"""``doctor``: what will go wrong in a run, found before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lightning_mp.numerics.rng import rng_state, set_rng_state
from lightning_mp.policy.hardware import Device
from lightning_mp.preflight.checks import CHECKS
from lightning_mp.preflight.fit_checks import case_of, made
from lightning_mp.record.events import SEVERITIES
from lightning_mp.record.findings import Finding

__all__ = ["doctor"]


def doctor(
    model: nn.Module,
    plan: Any = None,
    strategy: Any = None,
    trainer_args: Mapping[str, Any] | None = None,
    *,
    optimizer: Any = None,
    device: Device | None = None,
) -> list[Finding]:
    """What will go wrong in training ``model``, before it does: findings, most severe first; none for a healthy run.

    The model is left as it is: parameters, gradients, buffers, training mode, hooks and random numbers. A check that
    cannot be made on it is skipped, and logged at level INFO by the logger ``lightning_mp.preflight.fit_checks``.

    Args:
        model: a LightningModule, or any module.
        plan: a MixedPrecisionPlan, its policy or a mapping of its fields; one of Lightning's own precisions
            (``"16-mixed"``) or plugins; ``None``: what ``trainer_args`` says.
        strategy: a strategy or its name; a DeepSpeed JSON as a mapping; ``None``: what ``trainer_args`` says.
        trainer_args: the Trainer's arguments: ``accelerator``, ``accumulate_grad_batches``, ``gradient_clip_val``, ….
        optimizer: what ``configure_optimizers`` would return, where it cannot be called without a Trainer.
        device: the device it will run on, where that is not the one ``trainer_args`` chooses on this machine.

    Raises:
        PlanError: ``model`` is no module, or ``plan`` is none; every fault of a plan at once.
    """
    case = case_of(model, plan, strategy, trainer_args or {}, device, optimizer=optimizer)
    here = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    generators = rng_state(here)
    try:
        found = [finding for check in CHECKS for finding in made(check, case)]
    finally:
        set_rng_state(generators, here)
    return sorted(found, key=lambda finding: (-SEVERITIES.index(finding.severity), finding.code))
