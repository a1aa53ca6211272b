"""Every way in which the loss scale moves; ``adjust`` is the rule as a pure function, tested as a table."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from lightning_mp.compat import torch as compat
from lightning_mp.policy.loss_scaling import FP32_MAX, LossScaling


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


def place(state: LossScaleState, device: torch.device | str) -> LossScaleState:
    """The same state as 0-d tensors on ``device``; what is there already is kept, not copied."""

    def placed(value: float | Tensor, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(value, dtype=dtype, device=device)

    return LossScaleState(
        placed(state.scale, torch.float32),
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
    ops: Any = _OnDevice if isinstance(state.scale, Tensor) else _OnHost
    found = ops.flag(found_inf, state.scale)
    exhausted = found & (state.hysteresis_left <= 1)
    if not config.dynamic:
        return LossScaleState(state.scale, state.growth_tracker, state.hysteresis_left, found)
    ticked = ops.where(found, -config.growth_delay, state.growth_tracker + 1)
    grows = ticked == config.growth_interval  # never on an overflow: the tracker is then <= 0
    lowered = ops.at_least(ops.times(state.scale, config.backoff_factor), config.min_scale)
    raised = ops.times(state.scale, config.growth_factor)
    if config.max_scale is not None:
        raised = ops.at_most(raised, config.max_scale)
    if config.max_scale is None or ops is _OnDevice:  # on a device, "no ceiling" still ends where fp32 does
        raised = ops.where(ops.overflows(raised), state.scale, raised)
    refills = grows | ops.negate(found) if config.consecutive_hysteresis else grows
    spent: Any = state.hysteresis_left - 1
    left = ops.where(found, ops.at_least(spent, 1), state.hysteresis_left)
    return LossScaleState(
        scale=ops.where(exhausted, lowered, ops.where(grows, raised, state.scale)),
        growth_tracker=ops.where(grows, 0, ticked),
        hysteresis_left=ops.where(refills, config.hysteresis, left),
        overflowed_at_min=exhausted & (state.scale <= config.min_scale),
    )


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


class _OnHost:
    """The rule's operations on Python numbers; a growing or shrinking scale is rounded as fp32 would."""

    @staticmethod
    def flag(found: bool | Tensor, _: float) -> bool:
        return bool(found)

    @staticmethod
    def where(condition: bool, yes: Any, no: Any) -> Any:
        return yes if condition else no

    @staticmethod
    def times(scale: float, factor: float) -> float:
        try:
            return struct.unpack("<f", struct.pack("<f", scale * factor))[0]
        except OverflowError:  # past fp32: only a rule without a ceiling keeps that
            return scale * factor

    @staticmethod
    def overflows(scale: float) -> bool:
        return scale > FP32_MAX

    @staticmethod
    def negate(flag: bool) -> bool:
        return not flag

    at_least, at_most = staticmethod(max), staticmethod(min)


class _OnDevice:
    """The same on 0-d tensors, without a host read; products in fp64 first, as torch's own kernel makes them."""

    @staticmethod
    def flag(found: bool | Tensor, like: Tensor) -> Tensor:
        if isinstance(found, Tensor):
            return found.to(device=like.device, dtype=torch.bool).reshape(())
        return torch.full((), found, dtype=torch.bool, device=like.device)

    @staticmethod
    def where(condition: Tensor, yes: Any, no: Any) -> Tensor:
        kept = no if isinstance(no, Tensor) else yes
        return torch.where(condition, yes, no).to(kept.dtype)

    @staticmethod
    def times(scale: Tensor, factor: float) -> Tensor:
        if scale.device.type == "mps":  # has no fp64
            return scale * factor
        return (scale.double() * factor).to(scale.dtype)

    @staticmethod
    def overflows(scale: Tensor) -> Tensor:
        return scale.isinf()

    @staticmethod
    def negate(flag: Tensor) -> Tensor:
        return ~flag

    @staticmethod
    def at_least(value: Tensor, bound: float) -> Tensor:
        return value.clamp(min=bound)

    @staticmethod
    def at_most(value: Tensor, bound: float) -> Tensor:
        return value.clamp(max=bound)
