"""The loss scaler: ``torch.amp.GradScaler``'s interface, any rule of ``LossScaling``, and no device sync of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import IntEnum
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_mp.compat import torch as compat
from lightning_mp.errors import Fault, PlanError
from lightning_mp.numerics import loss_scale
from lightning_mp.numerics.dtypes import HALF
from lightning_mp.numerics.grads import gradients, parameters_of, step_unless, unscale_and_check_
from lightning_mp.numerics.loss_scale import LossScaleState
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy.loss_scaling import LossScaling


class _Stage(IntEnum):
    """How far an optimizer's gradients have come since its last backward pass."""

    SCALED = 0
    #: divided by the scale
    UNSCALED = 1
    #: the same by a user's ``unscale_``, which may be called once
    CHECKED = 2
    #: ``step`` was called; the next backward pass begins anew
    STEPPED = 3


def _plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where a trainer's wrapper around it was given."""
    return getattr(optimizer, "optimizer") if _is_wrapper(type(optimizer)) else optimizer  # noqa: B009  of no type


@cache
def _is_wrapper(kind: type[Any]) -> bool:
    return any(one.__name__ == "LightningOptimizer" for one in kind.__mro__)


class LossScaler(GradScaler):
    """A ``GradScaler`` whose scale follows a :class:`LossScaling`.

    Unlike torch's, it takes fp16 gradients (``16-true``), complex and sparse ones, steps fused optimizers whose
    gradients were unscaled and clipped before, and can keep gradients unscaled between backward passes.
    ``on_step`` is called after every step that a user asks for directly. With ``enabled=False`` the scale is 1 and
    never moves; gradients, which are on ``device``, are checked as under a scale, unless ``checks=False``.
    """

    def __init__(
        self,
        config: LossScaling,
        steps: StepCounter | None = None,
        *,
        on_step: Callable[[], None] | None = None,
        enabled: bool = True,
        device: torch.device | str = "cpu",
        checks: bool = True,
    ) -> None:
        rule = config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval
        super().__init__("cpu", *rule, enabled=enabled)
        self.config, self.enabled = config, enabled
        self.steps = StepCounter() if steps is None else steps
        self.checks = checks
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._next_floor_check = 0
        self._on_step = on_step
        #: a plan's, in a fit: gradients come from losses that it scaled, and others are refused
        self.within_run = False
        self._stages: dict[int, _Stage] = {}
        #: optimizers whose gradients wait unscaled, to be multiplied back before a backward pass adds to them
        self._waiting: set[int] = set()
        #: a loss was scaled since the scale was adjusted last
        self._scaled = False
        self._state = loss_scale.init(config)

    # ------------------------------------------------------------------ the state

    def place(self, device: torch.device | str) -> LossScaleState:
        """The state as 0-d tensors on ``device``."""
        scale = self._state.scale
        if not isinstance(scale, Tensor) or scale.device != torch.device(device):
            self._set_state(loss_scale.place(self._state, device))
        return self._state

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
        return bool(self._state.overflowed_at_min)

    def hits_floor(self) -> bool:
        """The same, asked of the device on the earliest step on which it can be so."""
        if not self.enabled or self.config.at_min != "raise" or self.steps.attempts < self._next_floor_check:
            return False
        if not self.overflowed_at_min:
            away = loss_scale.backoffs_to_floor(self.config, self.get_scale())
            self._next_floor_check = self.steps.attempts + away + 1
            return False
        return True

    def get_scale(self) -> float:
        """The scale as a Python number; a device sync once training has begun."""
        return float(self._state.scale) if self.enabled else 1.0

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
        if not state_dict:
            return
        before = self._state.scale
        self._state = loss_scale.resume(self.config, state_dict)
        if isinstance(before, Tensor):
            self.place(before.device)

    # ------------------------------------------------------------------ the loss and the gradients

    def scale(self, outputs: Any) -> Any:
        """A tensor, or each of a list, tuple or iterable of tensors, times the scale; half ones become fp32 first."""
        if not self.enabled:
            return outputs
        self._scaled = True
        if isinstance(outputs, Tensor):
            state = self.place(outputs.device)
            # the scale itself may be beyond fp16
            return (outputs.float() if outputs.dtype in HALF else outputs) * state.scale
        if isinstance(outputs, (list, tuple)):
            return type(outputs)([self.scale(output) for output in cast("list[Any]", outputs)])
        return map(self.scale, cast("Iterable[Any]", outputs))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once, and note whether they are finite.

        Raises:
            RuntimeError: a second call for the optimizer since the last ``update``, as torch's scaler does.
        """
        optimizer = _plain(optimizer)
        stage = self._stage(optimizer)
        if stage is _Stage.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        if stage is _Stage.CHECKED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self.check_finite_(optimizer)
        self._stages[id(optimizer)] = _Stage.CHECKED

    def check_finite_(self, optimizer: Optimizer) -> None:
        """Note whether the gradients are finite on this rank; unscale them, in the same pass, if nothing did yet.

        Of gradients that were looked at before it takes another look, since users may have changed them.

        Raises:
            PlanError: the loss of these gradients was not scaled, so that nothing is to be divided.
        """
        if not self.enabled:
            if self.checks:
                flag = self.steps.of(optimizer, self._one.device)
                unscale_and_check_(gradients(parameters_of(optimizer)), self._one, flag)
            return
        optimizer = _plain(optimizer)
        if self._stage(optimizer) is _Stage.SCALED:
            if self.within_run and not self._scaled:
                self._refuse_bare(optimizer)
            self._divide(optimizer, set())
            self._stages[id(optimizer)] = _Stage.UNSCALED
        else:
            flag = self._flag(optimizer)
            unscale_and_check_(gradients(parameters_of(optimizer)), torch.ones_like(flag), flag)

    def found_inf(self, optimizer: Optimizer) -> Tensor:
        """1 where the optimizer's gradients, when last looked at, were not finite on some rank, else 0."""
        optimizer = _plain(optimizer)
        if self._stage(optimizer) is _Stage.SCALED:
            self.check_finite_(optimizer)
        self.steps.reduce_(self._flag(optimizer))
        return self._flag(optimizer)

    def multiply_back_(self, optimizers: Iterable[Optimizer]) -> None:
        """Before a backward pass: bring unscaled gradients that wait back under the scale, to be added to."""
        seen: set[int] = set()
        for optimizer in map(_plain, optimizers):
            if not self.enabled:
                self.steps.drop(id(optimizer))  # what was seen of gradients that were not stepped with
                continue
            if id(optimizer) not in self._waiting:
                continue
            self._waiting.remove(id(optimizer))
            self._begin_anew(optimizer)
            waiting = gradients(_unseen(optimizer, seen))
            if waiting:
                unscale_and_check_(waiting, cast("Tensor", self._placed().scale), self._flag(optimizer))

    def divide_(self, optimizers: Iterable[Optimizer]) -> None:
        """After a backward pass: unscale every optimizer's gradients, for users who clip them."""
        seen: set[int] = set()
        for optimizer in map(_plain, optimizers) if self.enabled else ():
            if self._stage(optimizer) is _Stage.STEPPED:
                self._begin_anew(optimizer)
            if self._stage(optimizer) is _Stage.SCALED:
                self._divide(optimizer, seen)
                self._stages[id(optimizer)] = _Stage.UNSCALED
            self._waiting.add(id(optimizer))

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
        if not self.enabled:
            flag = self.steps.take(optimizer, self._one.device)
            if self.checks:
                self.steps.reduce_(flag)
        elif self._stage(optimizer) is _Stage.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        else:
            flag = self.found_inf(optimizer)
        self.steps.begin_step(flag)
        before, self.steps.under_way = self.steps.under_way, True
        try:
            if self.checks:
                result = step_unless(optimizer, flag, self.steps.read, **kwargs)
            else:
                result = optimizer.step(**kwargs)
        finally:
            self.steps.under_way = before
        if self.enabled:
            self._stages[id(optimizer)] = _Stage.STEPPED
            self.steps.end_step(optimizer, flag)
        return result

    def note_step(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Take note of a step that DeepSpeed unscaled, checked and made, with its flag."""
        self.steps.begin_step(found_inf)
        if self.enabled:
            self.steps.end_step(_plain(optimizer), found_inf)

    def stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer stepped since the last update, where there is a scale to update."""
        return self.enabled and self.steps.stepped(_plain(optimizer))

    def counts(self) -> Tensor | int:
        """Whether a skip of the last step counts against the budget: an overflow is ordinary, except at the floor."""
        if not self.enabled:
            return 1
        return torch.as_tensor(self.place(self.steps.last.device).scale <= self.config.floor)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale once for all optimizers that stepped since the last update; without any, do nothing."""
        if new_scale is not None:
            cast("Tensor", self._placed().scale).copy_(torch.as_tensor(new_scale))
            self._scaled = False
            self._stages.clear()
            self.steps.clear()
        elif self.steps.group_open:
            self._scaled = False
            for key in [key for key, stage in self._stages.items() if stage is _Stage.STEPPED]:
                self.steps.drop(key)
                del self._stages[key]
            self._set_state(loss_scale.adjust_(self.config, self._placed(), self.steps.take_group()))

    def forget(self) -> None:
        """Drop what is known of gradients and steps since the last update, and when the floor can be hit."""
        self.forget_floor()
        self._scaled = False
        self._stages.clear()
        self.steps.clear()
        self._waiting.clear()

    def forget_floor(self) -> None:
        """Ask for the floor again on the next step, whatever was known."""
        self._next_floor_check = self.steps.attempts + 1

    def set_growth_factor(self, new_factor: float) -> None:
        """Change the rule from the next update on."""
        self.config = replace(self.config, growth_factor=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change the rule from the next update on."""
        self.config = replace(self.config, backoff_factor=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Change the rule from the next update on."""
        self.config = replace(self.config, growth_interval=new_interval)

    def get_growth_factor(self) -> float:
        """What a growth multiplies the scale by."""
        return self.config.growth_factor

    def get_backoff_factor(self) -> float:
        """What an overflow multiplies the scale by."""
        return self.config.backoff_factor

    def get_growth_interval(self) -> int:
        """Clean steps before the scale grows."""
        return self.config.growth_interval

    # ------------------------------------------------------------------ helpers

    def _placed(self) -> LossScaleState:
        scale = self._state.scale
        return self._state if isinstance(scale, Tensor) else self.place("cpu")

    def _stage(self, optimizer: Optimizer) -> _Stage:
        # Without a scaled loss, gradients that are left from before, and what was added to them, are unscaled.
        left = not self._scaled and id(optimizer) in self._waiting
        return self._stages.get(id(optimizer), _Stage.UNSCALED if left else _Stage.SCALED)

    @staticmethod
    def _refuse_bare(optimizer: Optimizer) -> None:
        if all(parameter.grad is None for parameter in parameters_of(optimizer)):
            return
        fault = Fault(
            "gradients of a loss that was not scaled, as a bare loss.backward() leaves them, under a loss scale",
            "self.manual_backward(loss), or scaler.scale(loss).backward() with the plan's scaler",
            "write self.manual_backward(loss), or choose a precision without loss scaling ('bf16-mixed', '32-true')",
        )
        raise PlanError([fault])

    def _begin_anew(self, optimizer: Optimizer) -> None:
        self._stages.pop(id(optimizer), None)
        self.steps.drop(id(optimizer))

    def _flag(self, optimizer: Optimizer) -> Tensor:
        return self.steps.of(optimizer, cast("Tensor", self._placed().scale).device)

    def _divide(self, optimizer: Optimizer, seen: set[int]) -> None:
        fresh = _unseen(optimizer, seen)
        grads = gradients(fresh)
        if grads and not isinstance(self._state.scale, Tensor):
            self.place(grads[0].device)
        found = self._flag(optimizer)
        scale = cast("Tensor", self._placed().scale)
        # the reciprocal in fp64, as torch's scaler takes it; mps has none
        inverse = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        unscale_and_check_(grads, inverse, found)
        if len(fresh) < len(parameters_of(optimizer)):
            known = {id(parameter) for parameter in fresh}
            shared = gradients(parameter for parameter in parameters_of(optimizer) if id(parameter) not in known)
            unscale_and_check_(shared, torch.ones_like(found), found)


def _unseen(optimizer: Optimizer, seen: set[int]) -> list[Tensor]:
    """The optimizer's parameters that no optimizer before it had: a shared one must not be divided twice."""
    members = [parameter for parameter in parameters_of(optimizer) if id(parameter) not in seen]
    seen.update(map(id, members))
    return members
