"""The loss scale: its rule as a pure function, and a scaler that follows it and counts steps."""

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
    """The state of a loss scale.

    Its values are Python numbers, or 0-d tensors on one device: fp32 scale, int32 counters, a bool.
    """

    scale: float | Tensor
    #: clean steps since the last growth; ``-growth_delay`` at the start and after an overflow
    growth_tracker: int | Tensor
    #: overflows until the scale backs off; at 1 the next overflow lowers it
    hysteresis_left: int | Tensor
    #: True if the last step overflowed and the scale could not be lowered
    overflowed_at_min: bool | Tensor = False


def init(config: LossScaling, device: torch.device | str | None = None) -> LossScaleState:
    """Return the state before the first step: Python numbers, or 0-d tensors on ``device``."""
    state = LossScaleState(float(config.init_scale), -config.growth_delay, config.hysteresis)
    return state if device is None else place(state, device)


def place(state: LossScaleState, device: torch.device | str, dtype: torch.dtype = torch.float32) -> LossScaleState:
    """Return the state as 0-d tensors on ``device``, with the scale in ``dtype``.

    Tensors that have the device and the dtype already are not copied.
    """
    values = state.scale, state.growth_tracker, state.hysteresis_left, state.overflowed_at_min
    dtypes = dtype, torch.int32, torch.int32, torch.bool
    tensors = (torch.as_tensor(value, dtype=of, device=device) for value, of in zip(values, dtypes, strict=True))
    return LossScaleState(*tensors)


def adjust(config: LossScaling, state: LossScaleState, found_inf: bool | Tensor) -> LossScaleState:
    """Return the state after one step. ``found_inf`` is true if a gradient was not finite.

    ``found_inf`` is a bool, a bool tensor, or a 0/1 float tensor. A state of tensors gives a new
    state of tensors, without a device sync. A state of Python numbers gives Python numbers.

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
    # An fp32 scale ends at fp32's largest number even without a ceiling.
    if config.max_scale is None or scale.dtype is torch.float32:
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
    """Return ``scale * factor``, computed in fp64 and rounded to fp32, as torch's own kernel does.

    An fp64 scale keeps a product in fp64 if it is beyond fp32. On mps, which has no fp64, the
    product is computed in the scale's dtype.
    """
    if scale.device.type == "mps":
        return scale * factor
    product = scale.double() * factor
    rounded = product.float()
    return rounded if scale.dtype is torch.float32 else torch.where(rounded.isinf(), product, rounded.double())


# ------------------------------------------------------------------ the scaler


@dataclass(slots=True)
class _OptimizerState:
    """The scaler's record of one optimizer: its gradients, and its steps since ``update``."""

    #: held so that no other optimizer gets its ``id``
    optimizer: Optimizer
    #: the last operation on the gradients after backward; ``unscale_`` raises after "checked"
    stage: Literal["scaled", "unscaled", "checked", "stepped"] = "scaled"
    #: fp32, on the scale's device: 1 if a gradient is not finite on this rank, else 0. A step with
    #: ``sync`` makes it the maximum over ranks.
    flag: Tensor | None = None
    #: the maximum of the flags of its steps since the last ``update``; ``None`` without a step
    stepped: Tensor | None = None


class LossScaler(GradScaler):
    """A ``GradScaler`` that follows a :class:`LossScaling` and counts applied and skipped steps.

    Unlike torch's scaler:

    - It takes fp16 (``16-true``), complex and sparse gradients.
    - It steps fused optimizers whose gradients were unscaled and clipped before.
    - It can keep gradients unscaled between backward passes.

    Flags and counts stay on the device. A value that the host has read is kept until the next step.

    Args:
        config: the rule. ``None``: the scale is 1, the scaler is not ``enabled``, and gradients are
            still checked.
        on_step: called after every :meth:`step`.
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
        #: True if gradients are checked and bad steps skipped; if False, every step is applied
        self.checks = True
        #: True in a plan's fit: gradients of a loss that was not scaled raise a PlanError
        self.within_run = False
        #: True while an optimizer steps through this scaler
        self.stepping = False
        #: True if a loss was scaled since the last ``update``
        self._scaled = False
        #: True if a loss was scaled since ``divide_`` last unscaled gradients
        self._pass_is_scaled = False
        #: by ``id``, optimizers with checked gradients, or with steps since the last ``update``
        self._states: dict[int, _OptimizerState] = {}
        #: by ``id``, parameters whose unscaled gradients are scaled again before the next backward
        self._waiting: dict[int, Tensor] = {}
        #: steps, applied and skipped
        self.attempts = 0
        # These three are Python values if the host knows them, else scalars on the device.
        #: the number of skipped steps
        self.skipped: Tensor | int = 0
        #: the number of skipped steps in a row that count against the budget
        self._streak: Tensor | int = 0
        #: true if the last step was skipped
        self._last: Tensor | bool = False

    # ------------------------------------------------------------------ the state

    def place(self, device: torch.device | str) -> Any:
        """Move the state to ``device`` and return it. It begins on the CPU."""
        if self.state.scale.device != torch.device(device):
            self._set_state(place(self.state, device))
        return self.state

    def _set_state(self, state: LossScaleState) -> None:
        #: scale and counters, 0-d tensors
        self.state: Any = state
        compat.set_scale(self, self.state.scale, self.state.growth_tracker)

    @property
    def overflowed_at_min(self) -> bool:
        """True if the last update had an overflow at the lowest scale, with ``at_min="raise"``.

        With ``at_min="raise"`` this is a device sync.
        """
        return self.config.at_min == "raise" and bool(self.state.overflowed_at_min)

    def backoffs_left(self) -> float:
        """Return how many backoffs bring the scale to its floor. ``inf`` unless ``at_min="raise"``.

        0 if the floor is 0. With ``at_min="raise"`` this is a device sync.
        """
        if self.config.at_min != "raise":
            return math.inf
        floor, scale = self.config.min_scale, self.get_scale()
        away = math.log(scale / floor, 1 / self.config.backoff_factor) if floor > 0 and scale > floor else 0
        return math.ceil(away - 1e-9)

    def get_scale(self) -> float:
        """Return the scale as a Python number. A device sync once training has begun."""
        return float(self.state.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return ``GradScaler``'s keys and ``hysteresis_left``, as Python numbers.

        Stock Lightning can load them. A device sync.
        """
        return {
            "scale": self.get_scale(),
            **{name: getattr(self.config, name) for name in ("growth_factor", "backoff_factor", "growth_interval")},
            compat.GROWTH_TRACKER: int(self.state.growth_tracker),
            "hysteresis_left": int(self.state.hysteresis_left),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take scale and counters from a checkpoint of this package or of ``GradScaler``.

        The rule does not change: the values are clamped to its bounds, and a static scale stays at
        ``init_scale``. An empty dict changes nothing.

        Raises:
            KeyError: ``"scale"`` is missing, under a dynamic rule.
        """
        if not state_dict:
            return
        rule, device, scale = self.config, self.state.scale.device, self.config.init_scale
        if rule.dynamic:
            scale = min(max(float(state_dict["scale"]), rule.min_scale), rule.max_scale or math.inf)
        tracker = min(int(state_dict.get(compat.GROWTH_TRACKER, 0)), rule.growth_interval - 1)
        left = min(max(int(state_dict.get("hysteresis_left", rule.hysteresis)), 1), rule.hysteresis)
        self._set_state(place(LossScaleState(scale, max(tracker, -rule.growth_delay), left), device))

    def _set_rule(self, name: str, value: float) -> None:
        """Change a field of the rule from the next update on, as torch's setters do.

        Raises:
            PlanError: the value is out of the field's range.
        """
        getattr(super(), f"set_{name}")(value)
        self.config = replace(self.config, **{name: value})

    set_growth_factor: Any = partialmethod(_set_rule, "growth_factor")
    set_backoff_factor: Any = partialmethod(_set_rule, "backoff_factor")
    set_growth_interval: Any = partialmethod(_set_rule, "growth_interval")

    # ------------------------------------------------------------------ the loss and the gradients

    def scale(self, outputs: Any) -> Any:
        """Return ``outputs`` times the scale, or unchanged without a loss scale.

        ``outputs`` is a tensor, or a list, tuple or other iterable of tensors. Lists and tuples
        keep their class. Another iterable becomes an iterator. Half-precision tensors are cast to
        fp32 first, because the scale may be beyond fp16.
        """
        if not self.enabled:
            return outputs
        self._scaled = self._pass_is_scaled = True
        if isinstance(outputs, Tensor):
            scale: Any = self.place(outputs.device).scale
            return (outputs.float() if outputs.dtype in HALF else outputs) * scale
        if isinstance(outputs, (list, tuple)):
            return type(outputs)([self.scale(output) for output in cast("list[Any]", outputs)])
        return map(self.scale, cast("Iterable[Any]", outputs))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, and note if they are finite.

        Raises:
            RuntimeError: it was called before, or after ``step``, since the last ``update``.
            PlanError: as in :meth:`check_finite_`.
        """
        state = self._state_of(optimizer)
        if state.stage == "stepped":
            raise RuntimeError("unscale_() is being called after step().")
        if state.stage == "checked":
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self.check_finite_(optimizer)
        state.stage = "checked"

    def check_finite_(self, optimizer: Optimizer) -> None:
        """Note if the optimizer's gradients are finite on this rank, and unscale scaled gradients.

        Both happen in one pass, without a device sync. If ``checks`` is False nothing happens.

        Raises:
            PlanError: the loss of these gradients was not scaled, within a plan's fit.
        """
        if not self.checks:
            return
        state, parameters = self._state_of(optimizer), parameters_of(optimizer)
        if not self.enabled or state.stage != "scaled":
            self._check(parameters, state)
            return
        scaled = parameters
        # Without a new scaled loss, waiting gradients are unscaled, as is anything added to them.
        if not self._pass_is_scaled:
            scaled = [parameter for parameter in parameters if id(parameter) not in self._waiting]
        unscaled_loss = self.within_run and not self._scaled
        if unscaled_loss and any(parameter.grad is not None for parameter in scaled):
            raise PlanError.of(
                "gradients of a loss that was not scaled, as a bare loss.backward() leaves them, under a loss scale",
                "write self.manual_backward(loss), or choose a precision without loss scaling ('bf16-mixed')",
            )
        self._check(scaled, state, divide=True)
        if len(scaled) < len(parameters):
            self._check(parameters, state)
        state.stage = "unscaled"

    def multiply_back_(self) -> None:
        """Multiply waiting unscaled gradients by the scale, before a backward pass adds to them.

        They are left alone if a loss was scaled since ``divide_``. Notes about gradients are
        dropped. Steps since the last ``update`` are kept.
        """
        self._states = {key: state for key, state in self._states.items() if state.stepped is not None}
        for state in self._states.values():
            state.stage = "scaled"
            state.flag = None
        waiting = [*self._waiting.values()]
        self._waiting.clear()
        # A user who scaled a loss by hand has scaled gradients already.
        if waiting and not self._pass_is_scaled:
            scale = self.state.scale
            unscale_and_check_(gradients(waiting), scale, torch.zeros_like(scale))

    def divide_(self, optimizers: Iterable[Optimizer], others: Iterable[Tensor] = ()) -> None:
        """Unscale and check the gradients of ``optimizers`` after a backward pass.

        Users read them then. ``others`` are parameters that no optimizer updates. Their gradients
        are unscaled and not checked. Without a loss scale nothing happens.
        """
        if not self.enabled:
            return
        for optimizer in optimizers:
            state, parameters = self._state_of(optimizer), parameters_of(optimizer)
            fresh = self._begin_to_wait(parameters)
            self._check(fresh, state, divide=True)
            if len(fresh) < len(parameters):  # another optimizer shares the rest, and divided it
                self._check(parameters, state)
            state.stage = "unscaled"
        self.divide_unchecked_(others)
        self._pass_is_scaled = False

    def divide_unchecked_(self, parameters: Iterable[Tensor]) -> None:
        """Unscale the gradients of ``parameters`` unless they wait unscaled. Do not check them."""
        fresh = gradients(self._begin_to_wait(parameters))
        if fresh:
            scale = self.state.scale
            unscale_and_check_(fresh, _reciprocal(scale), torch.zeros_like(scale))

    @property
    def any_waits(self) -> bool:
        """True if gradients wait unscaled for the next backward pass."""
        return bool(self._waiting)

    def _begin_to_wait(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Note that the parameters' gradients are unscaled. Return the newly noted parameters."""
        fresh: list[Tensor] = []
        for parameter in parameters:
            if id(parameter) not in self._waiting:
                self._waiting[id(parameter)] = parameter
                fresh.append(parameter)
        return fresh

    def _check(self, parameters: Iterable[Tensor], state: _OptimizerState, *, divide: bool = False) -> None:
        """Set the state's flag if a gradient is not finite. With ``divide``, also unscale."""
        scale: Any = self.state.scale  # 1 without a loss scale
        if state.flag is None:
            state.flag = torch.zeros_like(scale)
        factor = scale
        if divide:
            factor = _reciprocal(scale)
        elif self.enabled:
            factor = torch.ones_like(scale)
        unscale_and_check_(gradients(parameters), factor, state.flag, scaled=divide)

    # ------------------------------------------------------------------ the step

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Unscale if needed, then step the optimizer, or skip the step if a gradient is not finite.

        Raises:
            RuntimeError: a closure is given. With a loss scale, also a second call since the last
                ``update``. torch's scaler raises in both cases too.
            PlanError: as in :meth:`check_finite_`.
        """
        if "closure" in kwargs or args:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if unwrapped(optimizer) is not optimizer:
            cast("Any", optimizer).step(**kwargs)  # the wrapper counts the step and calls this again
            return
        self.check_finite_(optimizer)
        self.step_checked(optimizer, **kwargs)
        if self._on_step is not None:
            self._on_step()

    def step_checked(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step the optimizer unless its checked gradients were not finite, and count the step.

        With ``sync`` set and gradients checked this is a collective. Return the value of the
        optimizer's ``step``, or ``None`` if it was not called. A fused optimizer is called in every
        step, and skips on the device.

        Raises:
            RuntimeError: a second call since the last ``update``, with a loss scale.
        """
        state = self._state_of(optimizer)
        if state.stage == "stepped":
            raise RuntimeError("step() has already been called since the last update().")
        if state.flag is None:
            state.flag = torch.zeros_like(self.state.scale)
        flag = self._last = state.flag
        if self.sync is not None and self.checks:
            self.sync(flag)
        before, self.stepping = self.stepping, True
        try:
            result = step_unless(optimizer, flag, self._read, **kwargs) if self.checks else optimizer.step(**kwargs)
        finally:
            self.stepping = before
        self._count(state, flag)
        return result

    def note_unchecked(self) -> None:
        """Count a step with unchecked gradients as applied. It ends a row of skipped steps."""
        self.attempts += 1
        self._streak, self._last = 0, False

    def note_step(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Count a step that DeepSpeed made (``found_inf`` is 0) or skipped (``found_inf`` is 1)."""
        self._last = found_inf
        self._count(self._state_of(optimizer), found_inf)

    def _read(self, flag: Tensor) -> bool:
        self._last = skipped = bool(flag.item())
        return skipped

    def _count(self, state: _OptimizerState, flag: Tensor) -> None:
        self.attempts += 1
        if self.enabled:
            state.stage = "stepped"
            state.stepped = flag if state.stepped is None else torch.maximum(state.stepped, flag)
        elif self.checks and self._last is not False:  # a flag that the host read as 0 is reused
            state.flag = None
        if self._last is False:  # the host has read the flag, and the step was applied
            self._streak = 0
            return
        # An overflow is ordinary. It counts against the budget only at the lowest scale.
        counts = self.state.scale <= self._floor if self.enabled else 1
        self.skipped = self.skipped + flag
        self._streak = (self._streak + counts) * flag

    def stepped(self, optimizer: Optimizer) -> bool:
        """True if the optimizer stepped since the last ``update``. False without a loss scale."""
        return self._state_of(optimizer).stepped is not None

    @property
    def group_open(self) -> bool:
        """True if any optimizer stepped since the last ``update``. False without a loss scale."""
        return any(state.stepped is not None for state in self._states.values())

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale once for all optimizers that stepped since the last update.

        An overflow of one optimizer counts for all. With ``new_scale`` the scale is set to it
        instead. If neither is the case, nothing happens.
        """
        flags = [state.stepped for state in self._states.values() if state.stepped is not None]
        if flags or new_scale is not None:
            self._scaled = self._pass_is_scaled = False
            # Notes are kept for optimizers that have not stepped since the last backward pass.
            rest = self._states.items() if new_scale is None else ()
            self._states = {key: state for key, state in rest if state.stage != "stepped"}
            for state in self._states.values():
                state.stepped = None
        if new_scale is not None:
            self.state.scale.copy_(torch.as_tensor(new_scale))
        elif flags:
            self._adjust(flags[0] if len(flags) == 1 else torch.stack(flags).amax())

    def _adjust(self, found_inf: Tensor) -> None:
        """Apply :func:`adjust` to the state.

        The most common rule uses torch's fused kernel and a clamp instead, because they need fewer
        launches.
        """
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
        """Drop all notes about gradients, and about steps since the last ``update``."""
        self._scaled = self._pass_is_scaled = False
        self._states.clear()
        self._waiting.clear()

    def forget_others(self, optimizers: Iterable[Optimizer]) -> None:
        """Drop notes about the gradients of all optimizers except ``optimizers``.

        Steps of the other optimizers still count in the next ``update``.
        """
        kept = {id(unwrapped(optimizer)) for optimizer in optimizers}
        states = self._states.items()
        self._states = {key: state for key, state in states if key in kept or state.stepped is not None}

    # ------------------------------------------------------------------ the counts

    @property
    def step_skipped(self) -> bool:
        """True if the last step was skipped. Like the counts, a device sync at most once a step."""
        return self._last if isinstance(self._last, bool) else self._read(self._last)

    def _counts(self) -> tuple[int, int]:
        if isinstance(self.skipped, Tensor):
            both = torch.stack((self.skipped, torch.as_tensor(self._streak).to(self.skipped))).tolist()
            self.skipped, self._streak = map(int, both)
        return self.skipped, int(self._streak)

    @property
    def skipped_steps(self) -> int:
        """Return how many steps were skipped."""
        return self._counts()[0]

    @property
    def applied_steps(self) -> int:
        """Return how many steps were applied."""
        return self.attempts - self.skipped_steps

    @property
    def streak(self) -> int:
        """Return how many skipped steps in a row, the last step included, count against the budget.

        With a loss scale only skips at its lowest value count.
        """
        return self._counts()[1]

    def counts(self) -> dict[str, int | bool]:
        """Return the counts as Python values, for a checkpoint. A device sync."""
        return {name: getattr(self, name) for name in ("applied_steps", "skipped_steps", "streak", "step_skipped")}

    def load_counts(self, counts: Mapping[str, int | bool]) -> None:
        """Take the counts of a checkpoint. ``step_skipped`` may be missing.

        Raises:
            KeyError: another count is missing.
        """
        self.skipped, self._streak = int(counts["skipped_steps"]), int(counts["streak"])
        self.attempts = int(counts["applied_steps"]) + self.skipped
        self._last = bool(counts.get("step_skipped"))

    # ------------------------------------------------------------------ helpers

    def _state_of(self, optimizer: Optimizer) -> _OptimizerState:
        """Return the optimizer's state, or create one.

        A LightningOptimizer shares the state of the optimizer that it wraps.
        """
        state = self._states.get(id(optimizer))
        if state is None:
            inner = unwrapped(optimizer)
            state = self._states.setdefault(id(inner), _OptimizerState(inner))
        return state


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that a LightningOptimizer wraps. Return any other optimizer itself."""
    wrapped = any(kind.__name__ == "LightningOptimizer" for kind in type(optimizer).__mro__)
    return cast("Any", optimizer).optimizer if wrapped else optimizer


def _reciprocal(scale: Tensor) -> Tensor:
    """Return the factor that unscales gradients, computed in fp64 as in torch's scaler.

    On mps, which has no fp64, it is computed in fp32.
    """
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
