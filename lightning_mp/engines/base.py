"""One optimizer step under a policy, whatever shards it: the methods are in the order in which they are called."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.engines import diagnosis, optimizer_facts, reduce
from lightning_mp.engines.budget import SkipBudget
from lightning_mp.errors import Faults, NonFiniteError
from lightning_mp.modules import checkpointing, pins
from lightning_mp.numerics import grads
from lightning_mp.numerics.dtypes import cast_module_, to_torch
from lightning_mp.numerics.no_op_scaler import NoOpScaler
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import PrecisionPolicy

#: runs the last batch forward and backward again, without summing over ranks, to find what broke it; or cannot
Replay = Callable[[], Tensor | None] | None


class StepEngine(ABC):
    """Carries a policy out on one kind of strategy; what differs between kinds is in its three subclasses."""

    def __init__(
        self,
        policy: PrecisionPolicy,
        *,
        device: torch.device,
        step_counter: StepCounter,
        scaler: LossScaler | None,
        distributed: bool,
        global_step: Callable[[], int],
    ) -> None:
        checks = policy.nonfinite.action != "ignore"
        self.policy, self.device, self.step_counter = policy, device, step_counter
        self.scaler = NoOpScaler(step_counter.found_inf, device, checks=checks) if scaler is None else scaler
        self.distributed, self._global_step = distributed, global_step
        self.optimizers: list[Optimizer] = []
        #: gradients came in since the last step
        self.pending = False
        #: the global gradient norm of the last clipping, before it, on the device
        self.last_norm: Tensor | None = None
        self._budget = SkipBudget(policy.nonfinite, self.scaler, step_counter)
        self._module: nn.Module | None = None
        self._pin_map = pins.PinMap((), ())
        self._checkpointed: list[nn.Module] = []
        self._applied: checkpointing.Applied | None = None
        self._loss: Tensor | None = None
        self._before: list[tuple[Tensor, Tensor]] = []

    # ------------------------------------------------------------------ the module

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Note what in ``module`` the policy cannot be carried out on; change nothing."""
        self._module = module
        self._pin_map = pins.resolve(module, self.policy.pins, faults)
        if self.policy.checkpointing is not None:
            self._checkpointed = checkpointing.select(module, self.policy.checkpointing, faults)

    @property
    def pin_map(self) -> pins.PinMap:
        """Which pin covers which module; known after ``check``."""
        return self._pin_map

    def stored_dtypes(self) -> Callable[[Tensor], torch.dtype]:
        """What tells the dtype in which each parameter of the checked module will be stored."""
        pinned, storage = self._pin_map.dtypes(), self.policy.storage_dtype
        return lambda parameter: to_torch(pinned.get(id(parameter), storage))

    def prepare(self, module: nn.Module) -> None:
        """Cast what no pin covers, then pin, then checkpoint, in place; ``check`` came before."""
        policy = self.policy
        covered = {id(member.module) for member in self._pin_map.members}
        pins.remove(submodule for submodule in module.modules() if id(submodule) not in covered)
        if self.may_be_reverted():
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

    @abstractmethod
    def may_be_reverted(self) -> bool:
        """Whether an optimizer, which is known only after ``prepare``, may yet be refused and the module given back."""

    def revert(self) -> None:
        """Bring the module back to what ``prepare`` found."""
        if self._module is not None:
            pins.remove(self._module.modules())
        for tensor, data in self._before:
            if tensor.dtype != data.dtype:
                tensor.data = data
        self._before = []

    @abstractmethod
    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Note which optimizers cannot step under the policy."""

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the optimizers, and the model as the strategy wrapped it.

        Raises:
            PlanError: an optimizer cannot step under the policy; the module is as it was where that is possible.
        """
        faults = Faults()
        self.check_optimizers(optimizers, faults)
        if faults.found:
            self.revert()
        faults.raise_if_any()
        self.optimizers, self._before = list(optimizers), []
        self.scaler.forget()
        self.scaler.flags.sync_with(reduce.max_over_ranks_ if self.distributed else None)
        self._budget.restart()

    def release(self) -> None:
        """Take activation checkpointing out again; pins stay, as the dtypes they protect do."""
        if self._applied is not None:
            self._applied.undo()
            self._applied = None
        self._module, self._loss, self._before = None, None, []
        self._pin_map, self._checkpointed = pins.PinMap((), ()), []
        self.optimizers, self.pending = [], False

    # ------------------------------------------------------------------ the step

    def before_backward(self, loss: Tensor, *, manual: bool) -> Tensor:
        """The loss to run backward on: times the scale where there is one."""
        self.pending, self._loss = True, loss.detach()
        if manual:
            self.scaler.multiply_back_(self.optimizers)
        return self.scaler.scale(loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> bool:
        """Run backward where the strategy's own engine has to; whether it did."""
        return False

    def after_backward(self, *, manual: bool) -> None:
        """Under manual optimization gradients are in true units at once: users clip them before they step."""
        if manual:
            self.scaler.divide_(self.optimizers)

    def training_step(self) -> AbstractContextManager[Any]:
        """Around ``training_step``."""
        return nullcontext()

    def user_hooks(self) -> AbstractContextManager[Any]:
        """Around hooks in which users may look at gradients."""
        return nullcontext()

    def steps_with_closure(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer cannot step without evaluating the closure itself (LBFGS)."""
        return optimizer_facts.calls_closure_again(optimizer)

    def may_call_closure(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer may evaluate a closure of its own accord (SAM and its kind); torch's own do not."""
        return optimizer_facts.takes_closure(optimizer)

    def unscale(self, optimizer: Optimizer) -> None:
        """Bring gradients into true units and find out, in the same pass, whether they are finite on every rank."""
        if self.scaler.stepped(optimizer):  # it steps again: what came before was a group of its own
            self.scaler.update()
        self.scaler.found_inf(optimizer)

    @abstractmethod
    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Clip by the global 2-norm, in fp32, and note it."""

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        """Clip every entry to ``[-value, value]``."""
        torch.nn.utils.clip_grad_value_(grads.parameters_of(optimizer), value)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer, or leave everything as it was if a gradient was not finite."""
        self.pending = False
        self.scaler.step_checked(optimizer, **kwargs)
        self.count()

    def step_with_closure(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """The whole step of an optimizer that evaluates the closure itself; what it returns."""
        raise NotImplementedError(f"{type(self).__name__} refuses such optimizers in check_optimizers()")

    def count(self) -> None:
        """Count the step that was just made, here or by a user's own ``scaler.step``."""
        self.step_counter.record(self.scaler.counts())

    def settle(self, replay: Replay) -> None:
        """Adjust the scale once every optimizer of the group stepped, and look at the budget."""
        if all(map(self.scaler.stepped, self.optimizers)):
            self.scaler.update()
        self.look(replay)

    def close_group(self) -> None:
        """``training_step`` is over: optimizers that did not step in it are not waited for."""
        if self.scaler.flags.group_open:
            self.scaler.update()
            self.look(None)

    # ------------------------------------------------------------------ the budget

    def look(self, replay: Replay) -> None:
        """Raise if the budget of skips, or the floor under ``at_min="raise"``, was passed."""
        if self.policy.nonfinite.action == "raise" and self._loss_is_bad():
            raise self._error(replay, "the loss itself is not finite, which no loss scale can help (nonfinite='raise')")
        exceeded = self._budget.exceeded()
        if exceeded is not None:
            raise self._error(replay, exceeded)
        if self._budget.floor_hit():
            raise self._error(replay, "overflow at the minimum loss scale (at_min='raise')", at_min=True)

    def _loss_is_bad(self) -> bool:
        """Whether a scaled step was skipped and its loss, on any rank, was non-finite before it was scaled."""
        if not isinstance(self.scaler, LossScaler) or self._loss is None or not self.step_counter.step_skipped:
            return False
        bad = (~torch.isfinite(self._loss)).any().float()
        if self.distributed:
            reduce.max_over_ranks_(bad)
        return bool(bad.item())

    def _error(self, replay: Replay, what: str, *, at_min: bool = False) -> NonFiniteError:
        assert self._module is not None, "settle() before check()"
        return diagnosis.error(
            self._module,
            replay,
            what=what,
            step=self._global_step(),
            loss=self._loss,
            scale=self.scaler.get_scale() if isinstance(self.scaler, LossScaler) else None,
            at_min=at_min,
            distributed=self.distributed,
        )
