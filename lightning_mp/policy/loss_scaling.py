"""How the loss scale moves, as data: the fields, their ranges, and the constructors for three known systems."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_mp.errors import Faults, is_number
from lightning_mp.policy.pieces import expression

# torch.amp.GradScaler's defaults, https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
TORCH_INIT_SCALE = 2.0**16
TORCH_GROWTH_INTERVAL = 2000
FP32_MAX = 3.4028234663852886e38


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScaling:
    """How the loss scale of the fp16 modes moves.

    A clean step is one whose gradients are all finite. After ``growth_interval`` clean steps the scale is multiplied
    by ``growth_factor``; after ``hysteresis`` overflows it is multiplied by ``backoff_factor``, never below
    ``min_scale`` nor above ``max_scale``. Alone, ``LossScaling()`` is torch's rule with a floor of 1 that is held.

    Args:
        init_scale: the scale of the first step.
        growth_factor: what the scale is multiplied by when it grows.
        backoff_factor: what the scale is multiplied by when it backs off.
        growth_interval: clean steps before the scale grows.
        growth_delay: clean steps added before the *first* growth at the start and after an overflow (DeepSpeed: 1).
        hysteresis: overflows before the scale backs off.
        consecutive_hysteresis: whether any clean step refills the hysteresis, or only a growth does.
        min_scale: the scale never falls below it.
        max_scale: ``None``: growth that would overflow fp32 is left out, as torch does; ``inf``: no ceiling.
        at_min: what an overflow at ``min_scale`` does: ``"hold"`` skips the step, ``"raise"`` raises LossScaleError.
        dynamic: ``False``: the scale never moves.

    Raises:
        PlanError: a value out of its range; every such value is named.
    """

    init_scale: float = TORCH_INIT_SCALE
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = TORCH_GROWTH_INTERVAL
    growth_delay: int = 0
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    min_scale: float = 1.0
    max_scale: float | None = None
    at_min: Literal["hold", "raise"] = "hold"
    dynamic: bool = True

    __repr__ = expression

    def __post_init__(self) -> None:
        with Faults("LossScaling") as faults:
            self._check_numbers(faults)
            self._check_bounds(faults)
            for name in ("dynamic", "consecutive_hysteresis"):
                faults.one_of(name, getattr(self, name), (True, False), "write a boolean, without quotes")
            faults.one_of(
                "at_min", self.at_min, ("hold", "raise"), "write 'hold' to skip the step at min_scale, or 'raise'"
            )

    def _check_numbers(self, faults: Faults) -> None:
        for name, (fits, allowed, fix) in _RANGES.items():
            if not fits(getattr(self, name)):
                faults.add(f"{name}={getattr(self, name)!r}", allowed, fix)
        for name, least in (("growth_interval", 1), ("growth_delay", 0), ("hysteresis", 1)):
            faults.whole(name, getattr(self, name), least, f"write a number of steps, at least {least}")

    def _check_bounds(self, faults: Faults) -> None:
        wrong = {fault.given.partition("=")[0] for fault in faults.found}
        if wrong & {"min_scale", "max_scale"}:
            return
        least, most, allowed = self.min_scale, math.inf if self.max_scale is None else self.max_scale, "min_scale <= "
        given = f"min_scale={least!r}, max_scale={self.max_scale!r}"
        if least > most:
            faults.add(given.replace(",", " above"), f"{allowed}max_scale", "swap them, or leave max_scale out")
        elif self.dynamic and "init_scale" not in wrong and not least <= self.init_scale <= most:
            given, fix = f"init_scale={self.init_scale!r} with {given}", "move init_scale between the bounds"
            faults.add(given, f"{allowed}init_scale <= max_scale", fix)

    @property
    def floor(self) -> float:
        """The scale below which the rule does not go."""
        return self.min_scale if self.dynamic else self.init_scale

    @classmethod
    def torch(
        cls,
        init_scale: float = TORCH_INIT_SCALE,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = TORCH_GROWTH_INTERVAL,
    ) -> LossScaling:
        """``torch.amp.GradScaler``'s sequence: no floor, and fp32's own overflow as the ceiling."""
        return cls(
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=0.0,
        )

    @classmethod
    def deepspeed(
        cls,
        loss_scale: float = 0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1,
        at_min: Literal["hold", "raise"] = "raise",
    ) -> LossScaling:
        """``deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler``'s sequence, from DeepSpeed's own JSON keys.

        ``loss_scale > 0`` is a static scale, as in DeepSpeed. It grows first after ``loss_scale_window + 1`` clean
        steps, at the start and after an overflow, then every ``loss_scale_window``.
        """
        if is_number(loss_scale) and loss_scale > 0:
            return cls.static(loss_scale)
        power = initial_scale_power
        with Faults("LossScaling.deepspeed") as faults:
            if loss_scale != 0 or isinstance(loss_scale, bool):
                faults.add(f"loss_scale={loss_scale!r}", "0 (dynamic) or a number > 0 (static)", "write 0")
            if not is_number(power) or not -126 <= power <= 127:
                faults.add(f"initial_scale_power={power!r}", "a number from -126 to 127", "write 16 for 65536")
        return cls(
            init_scale=2.0**initial_scale_power,
            growth_interval=loss_scale_window,
            growth_delay=1,
            hysteresis=hysteresis,
            consecutive_hysteresis=consecutive_hysteresis,
            min_scale=min_loss_scale,
            max_scale=math.inf,
            at_min=at_min,
        )

    @classmethod
    def megatron(
        cls,
        initial_scale: float = 2.0**32,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
    ) -> LossScaling:
        """Megatron-LM's ``DynamicGradScaler`` sequence, with the defaults of its command line."""
        return cls(
            init_scale=initial_scale,
            growth_factor=_fp32(growth_factor),  # Megatron keeps its factors in fp32 tensors
            backoff_factor=_fp32(backoff_factor),
            growth_interval=growth_interval,
            hysteresis=hysteresis,
            min_scale=min_scale,
            max_scale=math.inf,
        )

    @classmethod
    def static(cls, scale: float) -> LossScaling:
        """A scale that never moves; overflowing steps are still skipped."""
        return cls(init_scale=scale, min_scale=0.0, dynamic=False)


def _fp32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0] if is_number(value) and abs(value) <= FP32_MAX else value


_MOVES = "use {}, or dynamic=False for a scale that stays"
#: the fields that are numbers: whether one is in its range, how a message says that, and what to write instead
_RANGES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "init_scale": (
        lambda value: is_number(value) and 2.0**-149 <= value <= FP32_MAX,
        "a finite number > 0 that fp32 can hold",
        "leave it out for the default, 65536",
    ),
    "growth_factor": (lambda value: is_number(value) and value > 1, "a finite number > 1", _MOVES.format(2.0)),
    "backoff_factor": (
        lambda value: is_number(value) and 0 < value < 1,
        "a number between 0 and 1, both left out",
        _MOVES.format(0.5),
    ),
    "min_scale": (lambda value: is_number(value) and value >= 0, "a finite number >= 0", "write 1, the default"),
    "max_scale": (
        lambda value: value is None or value == math.inf or (is_number(value) and value > 0),
        "None or a number > 0",
        "leave it out for torch's own ceiling",
    ),
}
