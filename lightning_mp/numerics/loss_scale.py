"""The loss scale: its rule as a pure function, and the scaler that follows it and counts applied and skipped steps."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass, replace
from functools import partialmethod
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_mp.compat import torch as compat
from lightning_mp.errors import PlanError
from lightning_mp.numerics.dtypes import HALF
from lightning_mp.numerics.grads import gradients, parameters_of, step_unless, unscale_and_check_
from lightning_mp.policy.pieces import LossScaling


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
    values = state.scale, state.growth_tracker, state.hysteresis_left, state.overflowed_at_min
    dtypes = dtype, torch.int32, torch.int32, torch.bool
    tensors = (torch.as_tensor(value, dtype=of, device=device) for value, of in zip(values, dtypes, strict=True))
    return LossScaleState(*tensors)


def adjust(config: LossScaling, state: LossScaleState, found_inf: bool | Tensor) -> LossScaleState:
    """The state after one step whose gradients were finite (``found_inf`` false) or not.

    ``found_inf`` is a bool, a bool tensor, or a 0/1 float tensor. On a tensor state nothing is read back to the host.

    The rule is the union of ``torch._amp_update_scale_`` (ATen/native/cuda/AmpKernels.cu), DeepSpeed's
    ``DynamicLossScaler.update_scale`` and Megatron-LM's ``DynamicGradScaler.update``.
    """
    if not isinstance(state.scale, Tensor):
        values = astuple(adjust(config, place(state, "cpu", torch.float64), found_inf))
        return LossScaleState(*(value.item() for value in values))
    scale, tracker, left = state.scale, cast("Tensor", state.growth_tracker), cast("Tensor", state.hysteresis_left)
    overflowed = torch.as_tensor(found_inf, device=scale.device).to(torch.bool).reshape(())
    if not config.dynamic:
        return LossScaleState(scale, tracker, left, overflowed)
    exhausted = overflowed & (left <= 1)
    ticked = torch.where(overflowed, -config.growth_delay, tracker + 1)
    grows = ticked == config.growth_interval  # never on an overflow: the tracker is then <= 0
    lowered = _times(scale, config.backoff_factor).clamp(min=config.min_scale)
    raised = _times(scale, config.growth_factor)
    if config.max_scale is not None:
        raised = raised.clamp(max=config.max_scale)
    if config.max_scale is None or scale.dtype is torch.float32:  # there "no ceiling" still ends where fp32 does
        raised = torch.where(raised.float().isinf(), scale, raised)
    refills = grows | ~overflowed if config.consecutive_hysteresis else grows
    spent = torch.where(overflowed, (left - 1).clamp(min=1), left)
    return LossScaleState(
        scale=torch.where(exhausted, lowered, torch.where(grows, raised, scale)),
        growth_tracker=torch.where(grows, 0, ticked).to(tracker.dtype),
        hysteresis_left=torch.where(refills, config.hysteresis, spent).to(left.dtype),
        overflowed_at_min=exhausted & (scale <= config.min_scale),
    )


def _times(scale: Tensor, factor: float) -> Tensor:
    """Rounded to fp32 from a product in fp64, as torch's own kernel makes it; a fp64 scale may go beyond fp32."""
    if scale.device.type == "mps":  # has no fp64
        return scale * factor
    product = scale.double() * factor
    rounded = product.float()
    return rounded if scale.dtype is torch.float32 else torch.where(rounded.isinf(), product, rounded.double())


# ------------------------------------------------------------------ the scaler


@dataclass(slots=True)
class _Gradients:
    """What is known of one optimizer's gradients, and of its steps since the scale was adjusted last."""

    #: how far they have come since the last backward pass; "checked" is unscaled by a user, who may do so once
    stage: Literal["scaled", "unscaled", "checked", "stepped"] = "scaled"
    #: fp32, on the gradients' device: 1 where they are not finite on some rank, else 0
    flag: Tensor | None = None
    #: they wait unscaled, to be multiplied back before a backward pass adds to them
    waiting: bool = False
    #: the maximum of the flags of its steps
    stepped: Tensor | None = None


class LossScaler(GradScaler):
    """A ``GradScaler`` whose scale follows a :class:`LossScaling`, and which counts applied and skipped steps.

    Unlike torch's, it takes fp16 gradients (``16-true``), complex and sparse ones, steps fused optimizers whose
    gradients were unscaled and clipped before, and can keep gradients unscaled between backward passes. Flags and
    counts stay on the device; what the host reads is kept until the next step. Without a rule the scale is 1, and
    gradients are checked all the same. ``on_step`` is called after every step that a user asks for directly.
    """

    def __init__(self, config: LossScaling | None = None, *, on_step: Callable[[], None] | None = None) -> None:
        self.enabled = config is not None
        self.config = rule = config or LossScaling.static(1.0)
        factors = rule.init_scale, rule.growth_factor, rule.backoff_factor, rule.growth_interval
        super().__init__("cpu", *factors, enabled=self.enabled)
        self._floor = rule.floor
        self._set_state(init(rule, "cpu"))
        self._on_step = on_step
        #: reduces a flag in place, by its maximum over ranks
        self.sync: Callable[[Tensor], None] | None = None
        #: whether gradients are checked and steps held back; without it all are applied
        self.checks = True
        #: a plan's, in a fit: gradients come from losses that it scaled, and others are refused
        self.within_run = False
        #: a step that was decided here is under way; any other is made by somebody else
        self.stepping = False
        #: a loss was scaled since the scale was adjusted last
        self._scaled = False
        self._known: dict[int, _Gradients] = {}
        #: steps, applied and skipped
        self.attempts = 0
        #: how many were skipped, how many of them in a row count against the budget, and whether the last one was:
        #: numbers where the host knows them, else scalars on the device
        self.skipped: Tensor | int = 0
        self._streak: Tensor | int = 0
        self._last: Tensor | bool = False

    # ------------------------------------------------------------------ the state

    def place(self, device: torch.device | str) -> Any:
        """The state on ``device``; on the CPU at first."""
        if self.state.scale.device != torch.device(device):
            self._set_state(place(self.state, device))
        return self.state

    def _set_state(self, state: LossScaleState) -> None:
        #: scale and counters, 0-d tensors
        self.state: Any = state
        compat.set_scale(self, self.state.scale, self.state.growth_tracker)

    @property
    def overflowed_at_min(self) -> bool:
        """Whether the last update met an overflow at the floor, under ``at_min="raise"``; a device sync."""
        return self.config.at_min == "raise" and bool(self.state.overflowed_at_min)

    def backoffs_left(self) -> float:
        """Overflows until the floor is hit, where that raises, else ``inf``; a device sync."""
        if self.config.at_min != "raise":
            return math.inf
        floor, scale = self.config.min_scale, self.get_scale()
        away = math.log(scale / floor, 1 / self.config.backoff_factor) if floor > 0 and scale > floor else 0
        return math.ceil(away - 1e-9)

    def get_scale(self) -> float:
        """The scale as a Python number; a device sync once training has begun."""
        return float(self.state.scale)

    def state_dict(self) -> dict[str, Any]:
        """``GradScaler``'s keys, so that stock Lightning can take the checkpoint over, and ``hysteresis_left``."""
        return {
            "scale": self.get_scale(),
            **{name: getattr(self.config, name) for name in ("growth_factor", "backoff_factor", "growth_interval")},
            compat.GROWTH_TRACKER: int(self.state.growth_tracker),
            "hysteresis_left": int(self.state.hysteresis_left),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a checkpoint (this package's or ``GradScaler``'s); the rule itself stays the one declared."""
        if not state_dict:
            return
        rule, device, scale = self.config, self.state.scale.device, self.config.init_scale
        if rule.dynamic:
            scale = min(max(float(state_dict["scale"]), rule.min_scale), rule.max_scale or math.inf)
        tracker = min(int(state_dict.get(compat.GROWTH_TRACKER, 0)), rule.growth_interval - 1)
        left = min(max(int(state_dict.get("hysteresis_left", rule.hysteresis)), 1), rule.hysteresis)
        self._set_state(place(LossScaleState(scale, max(tracker, -rule.growth_delay), left), device))

    def _set_rule(self, name: str, value: float) -> None:
        """Change the rule from the next update on, as torch's setters do."""
        getattr(super(), f"set_{name}")(value)
        self.config = replace(self.config, **{name: value})

    set_growth_factor: Any = partialmethod(_set_rule, "growth_factor")
    set_backoff_factor: Any = partialmethod(_set_rule, "backoff_factor")
    set_growth_interval: Any = partialmethod(_set_rule, "growth_interval")

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
        """Divide the optimizer's gradients by the scale, and note whether they are finite; once, or RuntimeError."""
        known = self._of(optimizer)
        if known.stage == "stepped":
            raise RuntimeError("unscale_() is being called after step().")
        if known.stage == "checked":
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self.check_finite_(optimizer)
        known.stage = "checked"

    def check_finite_(self, optimizer: Optimizer) -> None:
        """Note whether the gradients are finite on this rank; unscale them, in the same pass, if nothing did yet.

        Raises:
            PlanError: the loss of these gradients was not scaled, so that nothing is to be divided.
        """
        if not self.checks:
            return
        known, parameters = self._of(optimizer), parameters_of(optimizer)
        # Without a scaled loss, gradients that are left from before, and what was added to them, are unscaled.
        divides = self.enabled and known.stage == "scaled" and (self._scaled or not known.waiting)
        unscaled = divides and self.within_run and not self._scaled
        if unscaled and any(parameter.grad is not None for parameter in parameters):
            raise PlanError.of(
                "gradients of a loss that was not scaled, as a bare loss.backward() leaves them, under a loss scale",
                "write self.manual_backward(loss), or choose a precision without loss scaling ('bf16-mixed')",
            )
        self._check(known, parameters, divide=divides)

    def multiply_back_(self, optimizers: Iterable[Optimizer]) -> None:
        """Before a backward pass: bring unscaled gradients that wait back under the scale, to be added to."""
        seen: set[int] = set()
        for optimizer in optimizers:
            known = self._of(optimizer)
            if not self.enabled:
                known.flag = None  # what was seen of gradients that were not stepped with
            elif known.waiting:
                scale = self.state.scale
                known.waiting, known.stage, known.flag = False, "scaled", torch.zeros_like(scale)
                unscale_and_check_(gradients(_fresh(parameters_of(optimizer), seen)), scale, known.flag)

    def divide_(self, optimizers: Iterable[Optimizer]) -> None:
        """After a backward pass: unscale every optimizer's gradients, for users who clip them."""
        seen: set[int] = set()
        for optimizer in optimizers if self.enabled else ():
            known, parameters = self._of(optimizer), parameters_of(optimizer)
            if known.stage == "stepped":
                known.stage, known.flag = "scaled", None
            if known.stage == "scaled" and (self._scaled or not known.waiting):
                fresh = _fresh(parameters, seen)
                self._check(known, fresh, divide=True)
                if len(fresh) < len(parameters):  # the others are divided, with an optimizer before this one
                    self._check(known, parameters)
            known.waiting = True

    def _check(self, known: _Gradients, parameters: Iterable[Tensor], *, divide: bool = False) -> None:
        """Note whether the gradients are finite, and divide them by the scale in the same pass."""
        if known.flag is None:
            known.flag = torch.zeros_like(self.state.scale)
        factor: Any = self.state.scale  # 1 where there is no loss scale
        if divide:
            # the reciprocal in fp64, as torch's scaler takes it; mps has none
            factor = factor.reciprocal() if factor.device.type == "mps" else factor.double().reciprocal().float()
            known.stage = "unscaled"
        elif self.enabled:
            factor = torch.ones_like(factor)
        unscale_and_check_(gradients(parameters), factor, known.flag, scaled=divide)

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
        """``step`` for the engine, which has checked; returns what the optimizer did, ``None`` for a known skip."""
        known = self._of(optimizer)
        if known.stage == "stepped":
            raise RuntimeError("step() has already been called since the last update().")
        if known.flag is None:
            known.flag = torch.zeros_like(self.state.scale)
        flag = self._last = known.flag
        if self.sync is not None and self.checks:
            self.sync(flag)
        before, self.stepping = self.stepping, True
        try:
            result = step_unless(optimizer, flag, self._read, **kwargs) if self.checks else optimizer.step(**kwargs)
        finally:
            self.stepping = before
        self._count(known, flag)
        return result

    def note_unchecked(self) -> None:
        """Count a step whose gradients nobody looks at as applied."""
        self.attempts += 1
        self._streak, self._last = 0, False

    def note_step(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Count a step that DeepSpeed unscaled, checked and made, with its flag."""
        self._last = found_inf
        self._count(self._of(optimizer), found_inf)

    def _read(self, flag: Tensor) -> bool:
        self._last = skipped = bool(flag.item())
        return skipped

    def _count(self, known: _Gradients, flag: Tensor) -> None:
        self.attempts += 1
        if self.enabled:
            known.stage = "stepped"
            known.stepped = flag if known.stepped is None else torch.maximum(known.stepped, flag)
        elif self.checks and self._last is not False:  # else it is still 0, and serves again
            known.flag = None
        if self._last is False:  # an optimizer that cannot take the flag: the host has asked
            self._streak = 0
            return
        # An overflow is ordinary, except at the floor: only there it counts against the budget.
        counts = self.state.scale <= self._floor if self.enabled else 1
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
        flags: list[Tensor] = []
        for known in self._known.values():
            if known.stepped is not None:
                flags.append(known.stepped)
                known.stepped = None
            if known.stage == "stepped" or new_scale is not None:
                known.stage, known.flag = "scaled", None
        if flags or new_scale is not None:
            self._scaled = False
        if new_scale is not None:
            self.state.scale.copy_(torch.as_tensor(new_scale))
        elif flags:
            self._adjust(flags[0] if len(flags) == 1 else torch.stack(flags).amax())

    def _adjust(self, found_inf: Tensor) -> None:
        """:func:`adjust`, in place; the common rule by torch's fused kernel and a bound, which are fewer launches."""
        rule, state = self.config, self.place(found_inf.device)
        plain = rule.dynamic and rule.hysteresis == 1 and not rule.growth_delay
        if not plain or rule.max_scale is not None or rule.at_min != "hold":
            self._set_state(adjust(rule, state, found_inf))
            return
        scale = state.scale
        factors = rule.growth_factor, rule.backoff_factor, rule.growth_interval
        compat.update_scale_(scale, state.growth_tracker, found_inf, *factors)
        if rule.min_scale > 0:
            scale.clamp_(min=rule.min_scale)

    def forget(self) -> None:
        """Drop what is known of gradients, and of steps since the last update."""
        self._scaled = False
        self._known.clear()

    # ------------------------------------------------------------------ the counts

    @property
    def step_skipped(self) -> bool:
        """Whether the last step was skipped; like the counts, a device sync once a step."""
        return self._last if isinstance(self._last, bool) else self._read(self._last)

    def _counts(self) -> tuple[int, int]:
        if isinstance(self.skipped, Tensor):
            both = torch.stack((self.skipped, torch.as_tensor(self._streak).to(self.skipped))).tolist()
            self.skipped, self._streak = map(int, both)
        return self.skipped, int(self._streak)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped."""
        return self._counts()[0]

    @property
    def applied_steps(self) -> int:
        """How many steps were applied."""
        return self.attempts - self.skipped_steps

    @property
    def streak(self) -> int:
        """How many skips in a row, the last one included, count against the budget."""
        return self._counts()[1]

    def counts(self) -> dict[str, int | bool]:
        """The counts as Python numbers."""
        return {name: getattr(self, name) for name in ("applied_steps", "skipped_steps", "streak", "step_skipped")}

    def load_counts(self, counts: Mapping[str, int | bool]) -> None:
        """Resume from the counts of a checkpoint."""
        self.skipped, self._streak = int(counts["skipped_steps"]), int(counts["streak"])
        self.attempts = int(counts["applied_steps"]) + self.skipped
        self._last = bool(counts.get("step_skipped"))

    # ------------------------------------------------------------------ helpers

    def _of(self, optimizer: Optimizer) -> _Gradients:
        known = self._known.get(id(optimizer))
        if known is None:  # a trainer's wrapper is never a key: what is known of it is known of the optimizer in it
            known = self._known.setdefault(id(_plain(optimizer)), _Gradients())
        return known


def _plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where a trainer's wrapper around it was given."""
    wrapped = any(kind.__name__ == "LightningOptimizer" for kind in type(optimizer).__mro__)
    return cast("Any", optimizer).optimizer if wrapped else optimizer


def _fresh(parameters: Iterable[Tensor], seen: set[int]) -> list[Tensor]:
    """The parameters that no optimizer before this one had."""
    fresh = [parameter for parameter in parameters if id(parameter) not in seen]
    seen.update(map(id, fresh))
    return fresh
