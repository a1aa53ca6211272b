"""The step on one device and under DistributedDataParallel: every rank holds whole parameters and whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_mp.engines import diagnosis, optimizer_facts, reduce
from lightning_mp.engines.base import Replay
from lightning_mp.errors import Faults, NonFiniteError
from lightning_mp.modules import checkpointing, pins
from lightning_mp.numerics import grads
from lightning_mp.numerics.dtypes import cast_module_, to_torch
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepLedger
from lightning_mp.policy import PrecisionPolicy


class EagerEngine:
    """Carries a policy out where gradients are whole (see ``base.StepEngine`` for the order of the calls)."""

    def __init__(
        self,
        policy: PrecisionPolicy,
        *,
        device: torch.device,
        ledger: StepLedger,
        scaler: LossScaler | None,
        distributed: bool,
        global_step: Callable[[], int],
    ) -> None:
        self.policy, self.device, self.ledger, self.scaler = policy, device, ledger, scaler
        self.distributed, self._global_step = distributed, global_step
        self.optimizers: list[Optimizer] = []
        #: gradients came in since the last step
        self.pending = False
        #: the global gradient norm of the last clipping, before it, on the device
        self.last_norm: Tensor | None = None
        self._module: nn.Module | None = None
        self._pin_map = pins.PinMap((), ())
        self._checkpointed: list[nn.Module] = []
        self._applied: checkpointing.Applied | None = None
        self._loss: Tensor | None = None
        self._found: dict[int, Tensor] = {}
        self._closure_optimizers: set[int] = set()
        self._may_call: set[int] = set()
        self._spare: Tensor | None = None
        self._before: list[tuple[Tensor, Tensor]] = []
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._next_look = self._next_floor_look = 0

    # ------------------------------------------------------------------ the module

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Match pins and checkpointing patterns; change nothing."""
        self._module = module
        self._pin_map = pins.resolve(module, self.policy.pins, faults)
        if self.policy.checkpointing is not None:
            self._checkpointed = checkpointing.select(module, self.policy.checkpointing, faults)

    @property
    def pin_map(self) -> pins.PinMap:
        """Which pin covers which module."""
        return self._pin_map

    def prepare(self, module: nn.Module) -> None:
        """Cast what no pin covers, then pin, then checkpoint."""
        policy = self.policy
        covered = {id(member.module) for member in self._pin_map.members}
        pins.remove(submodule for submodule in module.modules() if id(submodule) not in covered)
        if self.scaler is not None:  # connect() may yet refuse an optimizer
            self._before = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
        storage = to_torch(policy.storage_dtype)
        # Buffers follow half-precision parameters; beside fp32 ones they stay what the user made them.
        buffers = policy.buffer_dtype or (policy.storage_dtype if policy.storage_dtype != "fp32" else None)
        for submodule in module.modules():
            if id(submodule) not in covered:
                cast_module_(submodule, storage, buffers=False)
                if buffers is not None:
                    cast_module_(submodule, to_torch(buffers), parameters=False)
        pins.apply(
            self._pin_map,
            mixed=policy.mixed,
            compute_dtype=to_torch(policy.compute_dtype),
            device_type=self.device.type,
        )
        if policy.checkpointing is not None:
            self._applied = checkpointing.apply(module, self._checkpointed, policy.checkpointing)

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Check the optimizers against the policy, and set DDP's reduction."""
        self.optimizers = list(optimizers)
        if self.scaler is not None:
            self.scaler.forget()
            if self.distributed:
                self.scaler.sync_with(reduce.max_over_ranks_)
        self._closure_optimizers = set(map(id, filter(optimizer_facts.calls_closure_again, optimizers)))
        self._may_call = set(map(id, filter(optimizer_facts.takes_closure, optimizers)))
        self._next_look = self._next_floor_look = self.ledger.attempts + 1
        faults = Faults()
        for optimizer in self.optimizers:
            if self.scaler is not None and self.steps_with_closure(optimizer):
                faults.add(
                    f"{type(optimizer).__name__} with precision={self.policy.precision!r}",
                    "an optimizer that does not evaluate the closure itself, since the loss scale may change between",
                    "use AdamW or SGD, or a precision without loss scaling ('bf16-mixed', '32-true')",
                )
        if faults.found:
            self._revert()
        faults.raise_if_any()
        self._before = []
        if isinstance(model, DistributedDataParallel) and reduce.needs_hook(model, self.policy.reduce_dtype):
            reduce.reduce_in(model, self.policy.reduce_dtype)

    def _revert(self) -> None:
        """Bring back the module that ``prepare`` was given."""
        if self._module is not None:
            pins.remove(self._module.modules())
        for tensor, data in self._before:
            if tensor.dtype != data.dtype:
                tensor.data = data
        self._before = []

    def release(self) -> None:
        """Take activation checkpointing out again; pins stay, as the dtypes they protect do."""
        if self._applied is not None:
            self._applied.undo()
            self._applied = None
        self._module, self._loss, self._before = None, None, []
        self._pin_map, self._checkpointed = pins.PinMap((), ()), []
        self.optimizers, self._found, self.pending = [], {}, False

    # ------------------------------------------------------------------ the step

    def before_backward(self, loss: Tensor, *, manual: bool) -> Tensor:
        """The loss, times the scale where there is one."""
        self.pending, self._loss = True, loss.detach()
        if self.scaler is None:
            return loss
        if manual:
            self.scaler.multiply_back_(self.optimizers)
        return self.scaler.scale(loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Autograd does it."""
        return False

    def after_backward(self, *, manual: bool) -> None:
        """Under manual optimization gradients are in true units at once: users clip them before they step."""
        if self.scaler is not None and manual:
            self.scaler.divide_(self.optimizers)

    def steps_with_closure(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer evaluates the closure itself."""
        return id(optimizer) in self._closure_optimizers

    def may_call_closure(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer may evaluate a closure of its own accord (SAM and its kind); torch's own do not."""
        return id(optimizer) in self._may_call

    def unscale(self, optimizer: Optimizer) -> None:
        """One pass over the gradients: true units, and the flag, reduced over ranks."""
        if self.scaler is not None:
            if self.scaler.stepped(optimizer):  # it steps again: what came before was a group of its own
                self.scaler.update()
            self.scaler.found_inf(optimizer)
            return
        found, self._spare = self._spare, None
        if found is None:
            found = self._one.new_zeros(())
        if self.policy.nonfinite.action != "ignore":
            members = grads.gradients(grads.parameters_of(optimizer))
            grads.unscale_and_check_(members, self._one, found)
            if self.distributed:
                reduce.max_over_ranks_(found)
        self._found[id(optimizer)] = found

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, in fp32."""
        self.last_norm = grads.clip_grad_norm_(grads.parameters_of(optimizer), max_norm)

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        """Clip every entry to ``[-value, value]``."""
        torch.nn.utils.clip_grad_value_(grads.parameters_of(optimizer), value)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer, or leave everything as it was."""
        self.pending = False
        if self.scaler is None:
            found = self._found.pop(id(optimizer))
            self.ledger.open(found)
            if self.policy.nonfinite.action == "ignore":
                optimizer.step(**kwargs)
            else:
                grads.step_unless(optimizer, found, self.ledger.read, **kwargs)
            self.ledger.record(found)
            if self.ledger.known_clean:
                self._spare = found  # still 0: the next step need not allocate one
            return
        found = self.scaler.found_inf(optimizer)
        self.ledger.open(found)
        self.scaler.step_checked(optimizer, **kwargs)
        self.record(found)

    def record(self, found: Tensor) -> None:
        """Count a step under loss scaling: there an overflow is ordinary, until the scale can go no lower."""
        assert self.scaler is not None, "counts by the floor of a scale"
        scale = self.scaler.place(found.device).scale
        self.ledger.record(found, torch.as_tensor(scale <= self.scaler.config.floor))

    def step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """A step of an optimizer that evaluates the closure itself (LBFGS), undone if a gradient was not finite."""
        parameters = grads.parameters_of(optimizer)
        before = [parameter.detach().clone() for parameter in parameters]
        state = deepcopy(optimizer.state_dict())
        found = self._one.new_zeros(())

        def watched() -> Any:
            result = closure()
            grads.unscale_and_check_(grads.gradients(parameters), self._one, found)
            return result

        result = optimizer.step(watched, **kwargs)
        if self.distributed:
            reduce.max_over_ranks_(found)
        self.ledger.open(found)
        if self.policy.nonfinite.action != "ignore" and self.ledger.read(found):
            with torch.no_grad():
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.copy_(value)
            optimizer.load_state_dict(state)
        elif self.policy.nonfinite.action == "ignore":
            found.zero_()
        self.ledger.record(found)
        return result

    def settle(self, replay: Replay) -> None:
        """Adjust the scale once every optimizer of the group stepped, and look at the budget."""
        if self.scaler is not None and all(map(self.scaler.stepped, self.optimizers)):
            self.scaler.update()
        self.look(replay)

    def look(self, replay: Replay) -> None:
        """Raise if the budget of skips, or the floor under ``at_min="raise"``, was passed."""
        self._look_at_streak(replay)
        self._look_at_floor(replay)

    def close_group(self) -> None:
        """The training step is over: optimizers that did not step in it are not waited for."""
        if self.scaler is not None and self.scaler.group_open:
            self.scaler.update()
            self.look(None)

    # ------------------------------------------------------------------ the budget

    def _look_at_streak(self, replay: Replay) -> None:
        """Read the streak only on the earliest step on which it can have passed the budget."""
        rule = self.policy.nonfinite
        if rule.action == "ignore" and self.scaler is None:
            return
        budget = 0 if rule.action == "raise" else rule.max_consecutive
        if rule.action == "raise" and self._loss_is_bad():
            raise self._error(replay, "the loss itself is not finite, which no loss scale can help (nonfinite='raise')")
        if self.ledger.attempts < self._next_look:
            return
        streak = self.ledger.streak
        if streak > budget:
            many = "a step" if streak == 1 else f"{streak} steps in a row"
            raise self._error(replay, f"{many} with non-finite gradients, {budget} allowed")
        self._next_look = self.ledger.attempts + budget + 1 - streak

    def _loss_is_bad(self) -> bool:
        """Whether the step at hand was skipped and its loss, on any rank, was non-finite before it was scaled."""
        if self.scaler is None or self._loss is None or not self.ledger.step_skipped:
            return False
        bad = (~torch.isfinite(self._loss)).any().float()
        if self.distributed:
            reduce.max_over_ranks_(bad)
        return bool(bad.item())

    def _look_at_floor(self, replay: Replay) -> None:
        """Under ``at_min="raise"``: read the flag only on the earliest step on which the floor can have been hit."""
        scaler = self.scaler
        if scaler is None or scaler.config.at_min != "raise" or self.ledger.attempts < self._next_floor_look:
            return
        if scaler.overflowed_at_min:
            raise self._error(replay, "overflow at the minimum loss scale (at_min='raise')", at_min=True)
        scale, floor = scaler.get_scale(), scaler.config.min_scale
        away = math.log(scale / floor, 1 / scaler.config.backoff_factor) if floor > 0 and scale > floor else 0
        self._next_floor_look = self.ledger.attempts + math.ceil(away - 1e-9) + 1

    def _error(self, replay: Replay, what: str, *, at_min: bool = False) -> NonFiniteError:
        assert self._module is not None, "settle() before check()"
        return diagnosis.error(
            self._module,
            replay,
            what=what,
            step=self._global_step(),
            loss=self._loss,
            scale=None if self.scaler is None else self.scaler.get_scale(),
            at_min=at_min,
            distributed=self.distributed,
        )
