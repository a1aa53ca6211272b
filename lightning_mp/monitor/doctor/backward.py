"""One batch, forward and backward, on a copy: up to which loss scale its gradients stay finite."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_left
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import move_data_to_device
from lightning_mp.engines.eager import EagerEngine
from lightning_mp.errors import Faults
from lightning_mp.monitor.doctor.case import Case
from lightning_mp.monitor.side_run import loss_of, output_in
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.loss_scaling import LossScaling


def highest_fitting_scale(case: Case, rule: LossScaling) -> float | None:
    """The highest scale, on the way down from the initial one, at which no gradient of ``case.batch`` overflows.

    ``None`` where no scale down to 2**-24 helps. The copy runs where the model is.

    Raises:
        RuntimeError: the model gives no loss for the batch.
    """
    policy = case.policy or PrecisionPolicy(precision=case.precision)
    copied = deepcopy(case.model)
    device = next(copied.parameters()).device
    _prepare(copied, replace(policy, checkpointing=None), device)
    loss = _loss(copied, case.batch, policy, device)
    parameters = [parameter for parameter in copied.parameters() if parameter.requires_grad]
    backoffs = math.ceil(math.log(2.0**-24 / rule.init_scale, rule.backoff_factor))
    fits = partial(_fits, loss.float(), parameters)
    scales = [rule.init_scale * rule.backoff_factor**step for step in range(backoffs + 1)]
    if not torch.isfinite(loss) or not fits(scales[-1]):
        return None
    return scales[bisect_left(scales, True, key=fits)]  # the first that fits, and with it all lower ones


def _prepare(copied: nn.Module, policy: PrecisionPolicy, device: torch.device) -> None:
    """Cast and pin, as the run will."""
    engine = EagerEngine(
        policy, device=device, step_counter=StepCounter(), scaler=None, distributed=False, global_step=lambda: 0
    )
    with Faults() as faults:
        engine.check(copied, faults)
    engine.prepare(copied)


def _fits(loss: Tensor, parameters: list[nn.Parameter], scale: float) -> bool:
    gradients = torch.autograd.grad(loss * scale, parameters, retain_graph=True, allow_unused=True)
    known = (gradient for gradient in cast("tuple[Tensor | None, ...]", gradients) if gradient is not None)
    return all(bool(torch.isfinite(gradient).all()) for gradient in known)


def _loss(model: nn.Module, batch: Any, policy: PrecisionPolicy, device: torch.device) -> Tensor:
    autocast = policy.compute_dtype if policy.mixed else None
    batch = move_data_to_device(batch, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss: Any = loss_of(output_in(model, batch, device, autocast=autocast, storage=policy.storage_dtype))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise RuntimeError("the model gives no scalar loss for the batch")
    return loss.reshape(())
