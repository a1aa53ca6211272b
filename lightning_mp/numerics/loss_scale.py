"""Every way in which the loss scale moves; ``adjust`` is the rule as a pure function, tested as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_mp.compat import torch as compat
from lightning_mp.policy.loss_scaling import LossScaling


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """Where a loss scale stands: Python numbers, or 0-d tensors on one device (fp32 scale, int32 counters)."""

    scale: float | Tensor
    #: clean steps since the last growth; it starts ``growth_delay`` below 0, and again after an overflow
    growth_tracker: int | Tensor
    #: overflows left until the scale backs off; 1 means the next one does
    hysteresis_left: int | Tensor
    #: whether the last step overflowed where the scale could not be lowered any further
    overflowed_at_min: bool | Tensor = False


def init(config: LossScaling, device: torch.device | str | None = None) -> LossScaleState:
    """The state before the first step: Python numbers, or 0-d tensors on ``device``."""
    state = LossScaleState(float(config.init_scale), -config.growth_delay, config.hysteresis)
    return state if device is None else place(state, device)


def place(state: LossScaleState, device: torch.device | str, dtype: torch.dtype = torch.float32) -> LossScaleState:
    """The same state as 0-d tensors on ``device``; what is there already is kept, not copied."""

    def placed(value: float | Tensor, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype, device=device)

    return LossScaleState(
        placed(state.scale, dtype),
        placed(state.growth_tracker, torch.int32),
        placed(state.hysteresis_left, torch.int32),
        placed(state.overflowed_at_min, torch.bool),
    )


def adjust(config: LossScaling, state: LossScaleState, found_inf: bool | Tensor) -> LossScaleState:
    """The state after one step whose gradients were finite (``found_inf`` false) or not.

    ``found_inf`` is a bool, a bool tensor, or a 0/1 float tensor. On a tensor state nothing is read back to the host.
    The rule is the union of ``torch._amp_update_scale_`` (ATen/native/cuda/AmpKernels.cu), DeepSpeed's
    ``DynamicLossScaler.update_scale`` and Megatron-LM's ``DynamicGradScaler.update``.
    """
    if isinstance(state.scale, Tensor):
        return _adjusted(config, state, found_inf)
    values = astuple(_adjusted(config, place(state, "cpu", torch.float64), found_inf))
    return LossScaleState(*(value.item() for value in values))


def _adjusted(config: LossScaling, state: LossScaleState, found_inf: bool | Tensor) -> LossScaleState:
    scale, tracker, left = (cast("Tensor", one) for one in (state.scale, state.growth_tracker, state.hysteresis_left))
    found = torch.as_tensor(found_inf, device=scale.device).to(torch.bool).reshape(())
    exhausted = found & (left <= 1)
    if not config.dynamic:
        return LossScaleState(scale, tracker, left, found)
    ticked = torch.where(found, -config.growth_delay, tracker + 1)
    grows = ticked == config.growth_interval  # never on an overflow: the tracker is then <= 0
    lowered = _times(scale, config.backoff_factor).clamp(min=config.min_scale)
    raised = _times(scale, config.growth_factor)
    if config.max_scale is not None:
        raised = raised.clamp(max=config.max_scale)
    if config.max_scale is None or scale.dtype is torch.float32:  # there "no ceiling" still ends where fp32 does
        raised = torch.where(raised.float().isinf(), scale, raised)
    refills = grows | ~found if config.consecutive_hysteresis else grows
    return LossScaleState(
        scale=torch.where(exhausted, lowered, torch.where(grows, raised, scale)),
        growth_tracker=torch.where(grows, 0, ticked).to(tracker.dtype),
        hysteresis_left=torch.where(refills, config.hysteresis, torch.where(found, (left - 1).clamp(min=1), left)).to(
            left.dtype
        ),
        overflowed_at_min=exhausted & (scale <= config.min_scale),
    )


def _times(scale: Tensor, factor: float) -> Tensor:
    """Rounded to fp32 from a product in fp64, as torch's own kernel makes it; a fp64 scale may go beyond fp32."""
    if scale.device.type == "mps":  # has no fp64
        return scale * factor
    product = scale.double() * factor
    rounded = product.float()
    return rounded if scale.dtype is torch.float32 else torch.where(rounded.isinf(), product, rounded.double())


def adjust_(config: LossScaling, state: LossScaleState, found_inf: Tensor) -> LossScaleState:
    """The same as :func:`adjust` on a state of tensors, which it may overwrite; ``found_inf`` is a 0/1 fp32 scalar.

    The common rule is torch's fused kernel and a bound: the same sequence in fewer launches.
    """
    if not _is_torch_with_floor(config):
        return adjust(config, state, found_inf)
    scale, tracker = cast("Tensor", state.scale), cast("Tensor", state.growth_tracker)
    factors = config.growth_factor, config.backoff_factor, config.growth_interval
    compat.update_scale_(scale, tracker, found_inf, factors)
    if config.min_scale > 0:
        scale.clamp_(min=config.min_scale)
    return state


def _is_torch_with_floor(config: LossScaling) -> bool:
    plain = config.hysteresis == 1 and not config.growth_delay and config.max_scale is None
    return plain and config.dynamic and config.at_min == "hold"


def resume(config: LossScaling, saved: Mapping[str, Any]) -> LossScaleState:
    """The state that a checkpoint (this package's, or a ``GradScaler``'s) holds, within the bounds of ``config``."""
    scale = float(saved["scale"])
    if config.dynamic:
        scale = max(scale, config.min_scale)
        scale = scale if config.max_scale is None else min(scale, config.max_scale)
    else:
        scale = config.init_scale
    left = min(max(int(saved.get("hysteresis_left", config.hysteresis)), 1), config.hysteresis)
    tracker = min(int(saved.get(compat.GROWTH_TRACKER, 0)), config.growth_interval - 1)
    return LossScaleState(scale, max(tracker, -config.growth_delay), left)


def backoffs_to_floor(config: LossScaling, scale: float) -> int:
    """How many times the scale can back off before it is at the floor; 0 where there is no floor above 0."""
    floor = config.min_scale
    away = math.log(scale / floor, 1 / config.backoff_factor) if floor > 0 and scale > floor else 0
    return math.ceil(away - 1e-9)
