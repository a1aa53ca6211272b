"""The loss scale: its rule as a pure function, and the scaler that follows it and counts applied and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from enum import IntEnum
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_mp.compat import torch as compat
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics.dtypes import HALF
from lightning_mp.numerics.grads import gradients, parameters_of, step_unless, unscale_and_check_
from lightning_mp.policy.pieces import LossScaling

_UNSCALED = LossScaling.static(1.0)


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
    plain = config.dynamic and config.hysteresis == 1 and not config.growth_delay
    if not plain or config.max_scale is not None or config.at_min != "hold":
        return adjust(config, state, found_inf)
    scale, tracker = cast("Tensor", state.scale), cast("Tensor", state.growth_tracker)
    factors = config.growth_factor, config.backoff_factor, config.growth_interval
    compat.update_scale_(scale, tracker, found_inf, *factors)
    if config.min_scale > 0:
        scale.clamp_(min=config.min_scale)
    return state


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


# ------------------------------------------------------------------ the scaler


class _Stage(IntEnum):
    """How far an optimizer's gradients have come since its last backward pass."""

    SCALED = 0
    #: divided by the scale
    UNSCALED = 1
    #: the same by a user's ``unscale_``, which may be called once
    CHECKED = 2
    #: ``step`` was called; the next backward pass begins anew
    STEPPED = 3


@dataclass(slots=True)
class _Gradients:
    """What is known of one optimizer's gradients, and of its steps since the scale was adjusted last."""

    stage: _Stage = _Stage.SCALED
    #: fp32, on the gradients' device: 1 where they are not finite on some rank, else 0
    flag: Tensor | None = None
    #: they wait unscaled, to be multiplied back before a backward pass adds to them
    waiting: bool = False
    #: the maximum of the flags of its steps
    stepped: Tensor | None = None

    def begin_anew(self) -> None:
        """The next gradients are scaled, and nothing is known of them."""
        self.stage, self.flag = _Stage.SCALED, None


class LossScaler(GradScaler):
    """A ``GradScaler`` whose scale follows a :class:`LossScaling`, and which counts applied and skipped steps.

    Unlike torch's, it takes fp16 gradients (``16-true``), complex and sparse ones, steps fused optimizers whose
    gradients were unscaled and clipped before, and can keep gradients unscaled between backward passes. Flags and
    counts stay on the device; what the host reads is kept until the next step.

    Args:
        config: the rule; without one the scaler is disabled: the scale is 1, and gradients are checked all the same.
        on_step: called after every step that a user asks for directly.
    """

    def __init__(self, config: LossScaling | None = None, *, on_step: Callable[[], None] | None = None) -> None:
        self.config, self.enabled = config or _UNSCALED, config is not None
        rule = self.config.init_scale, self.config.growth_factor, self.config.backoff_factor
        super().__init__("cpu", *rule, self.config.growth_interval, enabled=self.enabled)
        self._state, self._floor = init(self.config), self.config.floor
        self._on_step = on_step
        #: whether gradients are checked and steps held back; without it all are applied
        self.checks = True
        #: a plan's, in a fit: gradients come from losses that it scaled, and others are refused
        self.within_run = False
        #: a step that was decided here is under way; any other is made by somebody else
        self.stepping = False
        #: a loss was scaled since the scale was adjusted last
        self._scaled = False
        self._known: dict[int, _Gradients] = {}
        self._sync: Callable[[Tensor], None] | None = None
        #: steps, applied and skipped
        self.attempts = 0
        #: how many were skipped: a number where the host knows it, else a scalar on the device
        self.skipped: Tensor | int = 0
        self._streak: Tensor | int = 0
        self._last: Tensor | None = None
        self._last_read: bool | None = False

    def sync_with(self, sync: Callable[[Tensor], None] | None) -> None:
        """Reduce flags with ``sync`` (in place, maximum over ranks) from now on."""
        self._sync = sync

    # ------------------------------------------------------------------ the state

    def place(self, device: torch.device | str) -> LossScaleState:
        """The state as 0-d tensors on ``device``."""
        scale = self._state.scale
        if not isinstance(scale, Tensor) or scale.device != torch.device(device):
            self._set_state(place(self._state, device))
        return self._state

    def _on_device(self) -> Tensor:
        scale = self._state.scale
        return scale if isinstance(scale, Tensor) else cast("Tensor", self.place("cpu").scale)

    def _set_state(self, state: LossScaleState) -> None:
        self._state = state
        compat.set_scale(self, cast("Tensor", state.scale), cast("Tensor", state.growth_tracker))

    @property
    def state(self) -> LossScaleState:
        """Scale and counters as they stand: on the device once training has begun, Python numbers before."""
        return self._state

    @property
    def overflowed_at_min(self) -> bool:
        """Whether the last update met an overflow at the floor, under ``at_min="raise"``; a device sync."""
        return self.config.at_min == "raise" and bool(self._state.overflowed_at_min)

    def backoffs_left(self) -> float:
        """Overflows until the floor is hit, where that raises, else ``inf``; a device sync."""
        floor, scale = self.config.min_scale, self.get_scale()
        if self.config.at_min != "raise":
            return math.inf
        away = math.log(scale / floor, 1 / self.config.backoff_factor) if floor > 0 and scale > floor else 0
        return math.ceil(away - 1e-9)

    def get_scale(self) -> float:
        """The scale as a Python number; a device sync once training has begun."""
        return float(self._state.scale)

    def state_dict(self) -> dict[str, Any]:
        """``GradScaler``'s keys, so that stock Lightning can take the checkpoint over, and ``hysteresis_left``."""
        return {
            "scale": self.get_scale(),
            "growth_factor": self.config.growth_factor,
            "backoff_factor": self.config.backoff_factor,
            "growth_interval": self.config.growth_interval,
            compat.GROWTH_TRACKER: int(self._state.growth_tracker),
            "hysteresis_left": int(self._state.hysteresis_left),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint (this package's or ``GradScaler``'s); the rule itself stays the one declared."""
        if state_dict:
            before, self._state = self._state.scale, resume(self.config, state_dict)
            if isinstance(before, Tensor):
                self.place(before.device)

    # ------------------------------------------------------------------ the loss and the gradients

    def scale(self, outputs: Any) -> Any:
        """A tensor, or each of a list, tuple or iterable of tensors, times the scale; half ones become fp32 first."""
        if not self.enabled:
            return outputs
        self._scaled = True
        if isinstance(outputs, Tensor):
            scale: Any = self.place(outputs.device).scale
            return (outputs.float() if outputs.dtype in HALF else outputs) * scale  # which may be beyond fp16
        if isinstance(outputs, (list, tuple)):
            return type(outputs)([self.scale(output) for output in cast("list[Any]", outputs)])
        return map(self.scale, cast("Iterable[Any]", outputs))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once, and note whether they are finite.

        Raises:
            RuntimeError: a second call for the optimizer since the last ``update``, as torch's scaler does.
        """
        optimizer = _plain(optimizer)
        known = self._of(optimizer)
        if known.stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        if known.stage is _Stage.CHECKED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self.check_finite_(optimizer)
        known.stage = _Stage.CHECKED

    def check_finite_(self, optimizer: Optimizer) -> None:
        """Note whether the gradients are finite on this rank; unscale them, in the same pass, if nothing did yet.

        Of gradients that were looked at before it takes another look, since users may have changed them.

        Raises:
            PlanError: the loss of these gradients was not scaled, so that nothing is to be divided.
        """
        if not self.checks:
            return
        known, parameters = self._of(optimizer), parameters_of(optimizer)
        if self.enabled and self._are_scaled(known):
            if self.within_run and not self._scaled:
                _refuse_bare(parameters)
            self._divide(known, parameters, ())
        else:
            self._check(known, gradients(parameters))

    def found_inf(self, optimizer: Optimizer) -> Tensor:
        """1 where the optimizer's gradients, when last looked at, were not finite on some rank, else 0."""
        known = self._of(optimizer)
        if self.enabled and self._are_scaled(known):
            self.check_finite_(optimizer)
        flag = self._flag(known)
        if self._sync is not None and self.checks:
            self._sync(flag)
        return flag

    def multiply_back_(self, optimizers: Iterable[Optimizer]) -> None:
        """Before a backward pass: bring unscaled gradients that wait back under the scale, to be added to."""
        seen: set[int] = set()
        for optimizer in optimizers:
            known = self._of(optimizer)
            if not self.enabled:
                known.flag = None  # what was seen of gradients that were not stepped with
            elif known.waiting:
                known.waiting = False
                known.begin_anew()
                waiting = gradients(_apart(optimizer, seen)[0])
                if waiting:
                    unscale_and_check_(waiting, self._on_device(), self._flag(known))

    def divide_(self, optimizers: Iterable[Optimizer]) -> None:
        """After a backward pass: unscale every optimizer's gradients, for users who clip them."""
        seen: set[int] = set()
        for optimizer in optimizers if self.enabled else ():
            known = self._of(optimizer)
            if known.stage is _Stage.STEPPED:
                known.begin_anew()
            if self._are_scaled(known):
                self._divide(known, *_apart(optimizer, seen))
            known.waiting = True

    # ------------------------------------------------------------------ the step

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Unscale if needed, then step the optimizer, or leave everything as it is if a gradient is not finite.

        Raises:
            RuntimeError: a second call since the last ``update``, or a closure, as torch's scaler does.
        """
        if "closure" in kwargs or args:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if _plain(optimizer) is not optimizer:
            cast("Any", optimizer).step(**kwargs)  # a trainer's wrapper counts the step and comes back here
            return
        self.check_finite_(optimizer)
        self.step_checked(optimizer, **kwargs)
        if self._on_step is not None:
            self._on_step()

    def step_checked(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """``step`` for the engine, which has looked at the gradients; ``closure`` is passed on.

        Returns what the optimizer returned, ``None`` where the host knows of a skip.
        """
        if self._of(optimizer).stage is _Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        flag = self._last = self.found_inf(optimizer)
        self._last_read = None
        before, self.stepping = self.stepping, True
        try:
            result = step_unless(optimizer, flag, self._read, **kwargs) if self.checks else optimizer.step(**kwargs)
        finally:
            self.stepping = before
        self._count(optimizer, flag)
        return result

    def note_step(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Count a step that DeepSpeed unscaled, checked and made, with its flag."""
        self._last, self._last_read = found_inf, None
        self._count(optimizer, found_inf)

    def _count(self, optimizer: Optimizer, flag: Tensor) -> None:
        self.attempts += 1
        known = self._of(optimizer)
        if self.enabled:
            known.stage = _Stage.STEPPED
            known.stepped = flag if known.stepped is None else torch.maximum(known.stepped, flag)
        elif self.checks and self._last_read is not False:  # else it is still 0, and serves again
            known.flag = None
        if self._last_read is False:  # an optimizer that cannot take the flag: the host has asked
            self._streak = 0
            return
        # An overflow is ordinary, except at the floor: only there it counts against the budget.
        counts = self._state.scale <= self._floor if self.enabled else 1
        self.skipped = self.skipped + flag
        self._streak = (self._streak + counts) * flag

    def stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer stepped since the scale was adjusted last, where there is one."""
        return self._of(optimizer).stepped is not None

    @property
    def group_open(self) -> bool:
        """Whether any optimizer did."""
        return any(known.stepped is not None for known in self._known.values())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale once for all optimizers that stepped since the last update; without any, do nothing."""
        if new_scale is not None:
            self._on_device().copy_(torch.as_tensor(new_scale))
            self._scaled = False
            for known in self._known.values():
                known.begin_anew()
                known.stepped = None
            return
        flags: list[Tensor] = []
        for known in self._known.values():
            if known.stepped is not None:
                flags.append(known.stepped)
                known.stepped = None
            if known.stage is _Stage.STEPPED:
                known.begin_anew()
        if flags:
            self._scaled = False
            found = flags[0] if len(flags) == 1 else torch.stack(flags).amax()
            state = adjust_(self.config, self.place(found.device), found)
            if state is not self._state:
                self._set_state(state)

    def forget(self) -> None:
        """Drop what is known of gradients, and of steps since the last update."""
        self._scaled = False
        self._known.clear()

    def set_growth_factor(self, new_factor: float) -> None:
        """Change the rule from the next update on."""
        super().set_growth_factor(new_factor)
        self.config = replace(self.config, growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change the rule from the next update on."""
        super().set_backoff_factor(new_factor)
        self.config = replace(self.config, backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Change the rule from the next update on."""
        super().set_growth_interval(new_interval)
        self.config = replace(self.config, growth_interval=new_interval)

    # ------------------------------------------------------------------ the counts

    @property
    def step_skipped(self) -> bool:
        """Whether the last step was skipped; a device sync, once a step."""
        if self._last_read is None:
            self._last_read = bool(cast("Tensor", self._last).item())
        return self._last_read

    def _read(self, flag: Tensor) -> bool:
        self._last_read = found = bool(flag.item())
        return found

    def _counts(self) -> tuple[int, int]:
        if isinstance(self.skipped, Tensor):
            both = torch.stack((self.skipped, torch.as_tensor(self._streak).to(self.skipped))).tolist()
            self.skipped, self._streak = map(int, both)
        return self.skipped, int(self._streak)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped; a device sync, once a step."""
        return self._counts()[0]

    @property
    def applied_steps(self) -> int:
        """How many steps were applied; a device sync, once a step."""
        return self.attempts - self.skipped_steps

    @property
    def streak(self) -> int:
        """How many skips in a row, the last one included, count against the budget; a device sync, once a step."""
        return self._counts()[1]

    def end_streak(self) -> None:
        """The skips so far count no more against the budget."""
        self._streak = 0

    def counts(self) -> dict[str, int | bool]:
        """The counts as Python numbers."""
        return {
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
            "streak": self.streak,
            "step_skipped": self.step_skipped,
        }

    def load_counts(self, counts: Mapping[str, int | bool]) -> None:
        """Resume from the counts of a checkpoint."""
        self.skipped, self._streak = int(counts["skipped_steps"]), int(counts["streak"])
        self.attempts = int(counts["applied_steps"]) + self.skipped
        self._last, self._last_read = None, bool(counts.get("step_skipped"))

    # ------------------------------------------------------------------ helpers

    def _of(self, optimizer: Optimizer) -> _Gradients:
        known = self._known.get(id(optimizer))
        if known is None:  # a trainer's wrapper is never a key: what is known of it is known of the optimizer in it
            known = self._known.setdefault(id(_plain(optimizer)), _Gradients())
        return known

    def _are_scaled(self, known: _Gradients) -> bool:
        # Without a scaled loss, gradients that are left from before, and what was added to them, are unscaled.
        return known.stage is _Stage.SCALED and (self._scaled or not known.waiting)

    def _flag(self, known: _Gradients) -> Tensor:
        if known.flag is None:
            # the dtype is written out: manual optimization runs where the default dtype may be a half one
            known.flag = torch.zeros((), dtype=torch.float32, device=self._on_device().device)
        return known.flag

    def _check(self, known: _Gradients, grads: list[Tensor]) -> None:
        flag = self._flag(known)
        unscale_and_check_(grads, torch.ones_like(flag) if self.enabled else self._on_device(), flag)

    def _divide(self, known: _Gradients, parameters: Iterable[Tensor], shared: Iterable[Tensor]) -> None:
        """Divide the gradients of ``parameters``, and check those of ``shared``, which were divided before."""
        scale = self._on_device()
        # the reciprocal in fp64, as torch's scaler takes it; mps has none
        inverse = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        unscale_and_check_(gradients(parameters), inverse, self._flag(known))
        if shared:
            self._check(known, gradients(shared))
        known.stage = _Stage.UNSCALED


def _plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where a trainer's wrapper around it was given."""
    return getattr(optimizer, "optimizer") if _is_wrapper(type(optimizer)) else optimizer  # noqa: B009  of no type


@cache
def _is_wrapper(kind: type[Any]) -> bool:
    return any(one.__name__ == "LightningOptimizer" for one in kind.__mro__)


def _apart(optimizer: Optimizer, seen: set[int]) -> tuple[list[Tensor], list[Tensor]]:
    """The optimizer's parameters: those that no optimizer before it had, and the others, divided once already."""
    parameters = parameters_of(optimizer)
    fresh = [parameter for parameter in parameters if id(parameter) not in seen]
    shared = [parameter for parameter in parameters if id(parameter) in seen]
    seen.update(map(id, fresh))
    return fresh, shared


def _refuse_bare(parameters: Iterable[Tensor]) -> None:
    if any(parameter.grad is not None for parameter in parameters):
        fault = Fault(
            "gradients of a loss that was not scaled, as a bare loss.backward() leaves them, under a loss scale",
            "self.manual_backward(loss), or scaler.scale(loss).backward() with the plan's scaler",
            "write self.manual_backward(loss), or choose a precision without loss scaling ('bf16-mixed', '32-true')",
        )
        raise PlanError([fault])
