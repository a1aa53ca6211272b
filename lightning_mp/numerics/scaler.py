"""The loss scaler: ``torch.amp.GradScaler``'s interface, any rule of ``LossScaling``, and no host read of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from lightning_mp.compat import torch as compat
from lightning_mp.numerics import loss_scale
from lightning_mp.numerics.dtypes import HALF
from lightning_mp.numerics.grads import HostRead, gradients, parameters_of, step_unless, unscale_and_check_
from lightning_mp.numerics.loss_scale import LossScaleState
from lightning_mp.policy.loss_scaling import LossScaling


@dataclass(slots=True)
class _Record:
    """What is known of one optimizer's gradients since its last update."""

    #: the gradients are in true units (divided by the scale)
    divided: bool = False
    #: ``unscale_`` was called, by whomever
    unscaled: bool = False
    #: ``step`` was called; the next backward pass begins a new record
    stepped: bool = False
    found_inf: Tensor | None = None


def _read(found_inf: Tensor) -> bool:
    return bool(found_inf.item())


def _plain(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where a trainer's wrapper around it was given."""
    wrapped = any(kind.__name__ == "LightningOptimizer" for kind in type(optimizer).__mro__)
    return cast("Any", optimizer).optimizer if wrapped else optimizer


class LossScaler(GradScaler):
    """A ``GradScaler`` whose scale follows a :class:`LossScaling`.

    Unlike torch's, it takes fp16 gradients (``16-true``), complex and sparse ones, steps fused optimizers whose
    gradients were unscaled and clipped before, and can keep gradients in true units between backward passes.
    ``read`` is asked for the flag where an optimizer cannot take it on the device; ``on_step`` is told the flag of
    every step that a user asks for directly.
    """

    def __init__(
        self,
        config: LossScaling,
        *,
        read: HostRead = _read,
        on_step: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__("cpu", config.init_scale, config.growth_factor, config.backoff_factor, config.growth_interval)
        self.config = config
        self._sync: Callable[[Tensor], None] | None = None
        self._host_read, self._on_step = read, on_step
        self._records: dict[int, _Record] = {}
        #: optimizers whose gradients wait in true units, to be multiplied back before a backward pass adds to them
        self._in_true_units: set[int] = set()
        #: the flags of every step since the last update, by optimizer
        self._group: dict[int, Tensor] = {}
        self._state = loss_scale.init(config)

    def sync_with(self, sync: Callable[[Tensor], None]) -> None:
        """Reduce every flag with ``sync`` (in place, maximum over ranks) from now on."""
        self._sync = sync

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
        """Whether the last update met an overflow at the floor, under ``at_min="raise"``; a host read."""
        return bool(self._state.overflowed_at_min)

    def get_scale(self) -> float:
        """The scale as a Python number; a host read once training has begun."""
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
        """Take up where a checkpoint (ours or ``GradScaler``'s) stood; the rule itself stays the one declared."""
        if not state_dict:
            return
        scale, config = float(state_dict["scale"]), self.config
        if config.dynamic:
            scale = max(scale, config.min_scale)
            scale = scale if config.max_scale is None else min(scale, config.max_scale)
        else:
            scale = config.init_scale
        left = min(max(int(state_dict.get("hysteresis_left", config.hysteresis)), 1), config.hysteresis)
        tracker = min(int(state_dict.get(compat.GROWTH_TRACKER, 0)), config.growth_interval - 1)
        before = self._state.scale
        self._state = LossScaleState(scale, max(tracker, -config.growth_delay), left)
        if isinstance(before, Tensor):
            self.place(before.device)

    # ------------------------------------------------------------------ the loss and the gradients

    def scale(self, outputs: Any) -> Any:
        """A tensor, or each of a list, tuple or iterable of tensors, times the scale; half ones become fp32 first."""
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
        record = self._record(optimizer)
        if record.stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if record.unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if not record.divided:
            self._divide(optimizer, record, set())
        record.unscaled = True
        if self._sync is not None:
            self._sync(self._found(record))

    def found_inf(self, optimizer: Optimizer) -> Tensor:
        """1 where the optimizer's gradients are not finite on some rank, else 0; unscales them if none did yet."""
        record = self._record(_plain(optimizer))
        if not record.unscaled:
            self.unscale_(optimizer)
        return self._found(record)

    def multiply_back_(self, optimizers: Iterable[Optimizer]) -> None:
        """Before a backward pass: bring gradients waiting in true units back under the scale, to be added to."""
        seen: set[int] = set()
        for optimizer in map(_plain, optimizers):
            if id(optimizer) not in self._in_true_units:
                continue
            self._in_true_units.remove(id(optimizer))
            waiting = gradients(_unseen(optimizer, seen))
            fresh = self._records[id(optimizer)] = _Record()
            if waiting:
                unscale_and_check_(waiting, cast("Tensor", self._placed().scale), self._found(fresh))

    def divide_(self, optimizers: Iterable[Optimizer]) -> None:
        """After a backward pass: bring every optimizer's gradients into true units, for users who clip them."""
        seen: set[int] = set()
        for optimizer in map(_plain, optimizers):
            record = self._record(optimizer)
            if record.stepped:
                record = self._records[id(optimizer)] = _Record()
            if not record.divided:
                self._divide(optimizer, record, seen)
            self._in_true_units.add(id(optimizer))

    # ------------------------------------------------------------------ the step

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Unscale if nobody did, then step the optimizer, or leave everything as it is if a gradient is not finite.

        Raises:
            RuntimeError: a second call since the last ``update``, or a closure, as torch's scaler does.
        """
        if "closure" in kwargs or args:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        if _plain(optimizer) is not optimizer:
            cast("Any", optimizer).step(**kwargs)  # a trainer's wrapper counts the step and comes back here
            return
        found_inf = self.step_checked(optimizer, **kwargs)
        if self._on_step is not None:
            self._on_step(found_inf)

    def step_checked(self, optimizer: Optimizer, **kwargs: Any) -> Tensor:
        """``step`` for a trainer's own call: nobody is told, and ``closure`` is handed on; the flag."""
        record = self._record(optimizer)
        if record.stepped:
            raise RuntimeError("step() has already been called since the last update().")
        found_inf = self.found_inf(optimizer)
        step_unless(optimizer, found_inf, self._host_read, **kwargs)
        record.stepped = True
        before = self._group.get(id(optimizer))
        self._group[id(optimizer)] = found_inf if before is None else torch.maximum(before, found_inf)
        return found_inf

    def note_step(self, optimizer: Optimizer, found_inf: Tensor) -> None:
        """Take note of a step that an engine of another's unscaled, checked and made, with its flag."""
        self._group[id(_plain(optimizer))] = found_inf

    @property
    def group_open(self) -> bool:
        """Whether an optimizer stepped since the last update."""
        return bool(self._group)

    def stepped(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer stepped since the last update."""
        return id(_plain(optimizer)) in self._group

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Adjust the scale once for all optimizers that stepped since the last update; without any, do nothing."""
        if new_scale is not None:
            cast("Tensor", self._placed().scale).copy_(torch.as_tensor(new_scale))
            self._records, self._group = {}, {}
        elif self._group:
            flags = list(self._group.values())
            self._group = {}
            self._records = {key: record for key, record in self._records.items() if not record.stepped}
            self._adjust(flags[0] if len(flags) == 1 else torch.stack(flags).amax())

    def forget(self) -> None:
        """Drop what is known of gradients and steps since the last update."""
        self._records, self._group = {}, {}
        self._in_true_units.clear()

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

    def _adjust(self, found_inf: Tensor) -> None:
        config, state = self.config, self._placed()
        if _is_torch_with_floor(config):
            # The common rule is torch's fused kernel and a bound: the same sequence in fewer launches.
            scale, tracker = cast("Tensor", state.scale), cast("Tensor", state.growth_tracker)
            rule = config.growth_factor, config.backoff_factor, config.growth_interval
            compat.update_scale_(scale, tracker, found_inf, rule)
            if config.min_scale > 0:
                scale.clamp_(min=config.min_scale)
            return
        self._set_state(loss_scale.adjust(config, state, found_inf))

    # ------------------------------------------------------------------ helpers

    def _placed(self) -> LossScaleState:
        scale = self._state.scale
        return self._state if isinstance(scale, Tensor) else self.place("cpu")

    def _record(self, optimizer: Optimizer) -> _Record:
        return self._records.setdefault(id(optimizer), _Record())

    def _found(self, record: _Record) -> Tensor:
        if record.found_inf is None:
            # dtypes are written out: manual optimization runs where the default dtype may be a half one
            record.found_inf = torch.zeros((), dtype=torch.float32, device=cast("Tensor", self._placed().scale).device)
        return record.found_inf

    def _divide(self, optimizer: Optimizer, record: _Record, seen: set[int]) -> None:
        fresh = _unseen(optimizer, seen)
        grads = gradients(fresh)
        if grads and not isinstance(self._state.scale, Tensor):
            self.place(grads[0].device)
        found = self._found(record)
        scale = cast("Tensor", self._placed().scale)
        # the reciprocal in fp64, as torch's scaler takes it; mps has none
        inverse = scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()
        unscale_and_check_(grads, inverse, found)
        if len(fresh) < len(parameters_of(optimizer)):
            known = {id(parameter) for parameter in fresh}
            shared = gradients(parameter for parameter in parameters_of(optimizer) if id(parameter) not in known)
            unscale_and_check_(shared, torch.ones_like(found), found)
        record.divided = True


def _is_torch_with_floor(config: LossScaling) -> bool:
    plain = config.hysteresis == 1 and not config.growth_delay and config.max_scale is None
    return plain and config.dynamic and config.at_min == "hold"


def _unseen(optimizer: Optimizer, seen: set[int]) -> list[Tensor]:
    """The optimizer's parameters that no optimizer before it had: a shared one must not be divided twice."""
    members = [parameter for parameter in parameters_of(optimizer) if id(parameter) not in seen]
    seen.update(map(id, members))
    return members
