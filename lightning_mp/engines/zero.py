"""The step under DeepSpeed's ZeRO: its optimizer shards, reduces and updates; scale, skips and counts are the plan's.

DeepSpeed's own fp16 and bf16 engines cast every parameter, adjust the scale before they divide by it, and stop at the
smallest scale. None of them runs here: parameters are stored as the policy says, autocast and pins compute, and the
ZeRO optimizer asks the plan's scaler what to divide by.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.compat.deepspeed import Zero, cast_partition, gathers, is_partitioned, partition_sums, refresh_masters
from lightning_mp.compat.lightning import trainer_of
from lightning_mp.compat.torch import is_compiled
from lightning_mp.engines import optimizer_facts
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.shard_watch import FirstForward, ShardReads
from lightning_mp.engines.zero_watch import GradientsElsewhere, Weights
from lightning_mp.errors import Fault, Faults
from lightning_mp.modules.half_copies import HalfCopy
from lightning_mp.numerics.autocast_weight import CastAlone
from lightning_mp.numerics.dtypes import to_torch


class ZeroEngine(StepEngine):
    """Carries a policy out through a ``deepspeed.DeepSpeedEngine`` with ZeRO stage 1, 2 or 3."""

    holds = "DeepSpeed partitions optimizer state, gradients and parameters by its stage"
    runs_backward = True
    gives_closure = False  # a ZeRO optimizer takes none
    #: until ``hand_over``: the optimizer is checked before DeepSpeed flattens and partitions
    may_be_reverted = True

    _zero: Zero | None = None
    #: the norm to clip by where the Trainer says nothing
    _default_clip = 0.0
    _weights: Weights | None = None
    #: of the weights after the last step, under offload
    _sums = torch.empty(0)
    #: DeepSpeed's engine is in its step
    _in_step = False
    _first: FirstForward | None = None
    #: by ``id``, names of the weights that are gathered in half precision, until a step was watched
    halves: Mapping[int, str] = MappingProxyType({})
    #: by param group, the index of the user's that it came from
    came_from: Sequence[int] = ()
    #: from a manual backward pass to the step, reads of gradients are watched
    _watching = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._decayed: dict[int, bool] = {}
        self.hook_watch = self._reads = GradientsElsewhere()

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Match patterns, and refuse what a ZeRO optimizer cannot be made to do."""
        super().check(module, faults)
        if self.policy.nonfinite.action == "ignore":
            faults.add(
                "nonfinite='ignore' with ZeRO",
                "'skip' or 'raise': a ZeRO optimizer does not step on a gradient norm that is not finite",
                "use nonfinite='skip', or strategy='mp_fsdp2'",
            )

    def check_optimizers(self, optimizers: Iterable[Optimizer], faults: Faults) -> None:
        """Refuse what does not step pieces of flat tensors; asked before a ZeRO optimizer takes its place."""
        for optimizer in optimizers:
            groups: list[dict[str, Any]] = optimizer.param_groups
            self._decayed |= {id(p): bool(group.get("weight_decay")) for group in groups for p in group["params"]}
            if optimizer_facts.calls_closure_again(optimizer):
                faults.extend([optimizer_facts.evaluates_again(optimizer, "with ZeRO")])
            elif len(list(optimizer_facts.parts(optimizer))) > 1:
                faults.add(
                    f"{type(optimizer).__name__} with ZeRO, an optimizer that holds another",
                    "an optimizer that steps its parameters itself, without a closure",
                    "use AdamW or SGD, or strategy='mp_ddp'",
                )
            else:
                optimizer_facts.check_shards(optimizer, "flat pieces", "ZeRO's pieces of flat tensors", faults)

    def hand_over(self) -> None:
        """DeepSpeed takes the module now: it cannot be brought back any more."""
        self._before = []
        for parameter in () if self._module is None else self._module.parameters():
            cast_partition(parameter)  # of those made partitioned, a pin has cast the empty shell

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the DeepSpeedEngine and its optimizer, and put the plan's scale in place of DeepSpeed's."""
        super().connect(model, [])
        self.optimizers = list(optimizers)
        parts: dict[str, nn.Module] = {} if self._module is None else dict(self._module.named_modules())
        parted = {
            name: part for name, part in parts.items() if any(map(is_partitioned, part.parameters(recurse=False)))
        }
        if parted and self.distributed:
            self._first = FirstForward(model, parted, self.device, gathers=gathers)
        if not optimizers:  # validation
            return
        zero = self._zero = Zero(model, optimizers[0])
        trainer = trainer_of(self._module)
        if trainer is None or trainer.gradient_clip_val is None:  # else Lightning asks for it, or the user's hook
            self._default_clip = zero.clip_of_json
        self._weights = Weights(() if self._module is None else self._module.named_parameters(), self._decayed)
        zero.patch(self._weights.refuse_apart, self._raw_step)
        self._note_sums()
        self.override_zero_settings()

    def override_zero_settings(self) -> None:
        """Put the plan's scale in place of DeepSpeed's, again after it loaded a checkpoint with its own."""
        if self._zero is not None and self._weights is not None:
            self._weights.loaded()
            self._zero.settle(self.scaler if self.scaler.enabled else None, self._default_clip)

    # ------------------------------------------------------------------ the step

    def before_backward(self, loss: Tensor) -> Tensor:
        """The loss, times the scale where there is one.

        Raises:
            RuntimeError: under manual optimization, a second backward pass before a step: ZeRO would lose the first.
        """
        if self.manual and self.pending:
            fault = Fault(
                "two manual_backward() before a step with ZeRO",
                "one, since each reduces and partitions the gradients anew",
                "add the losses up, or use strategy='mp_fsdp2'",
            )
            raise RuntimeError(str(fault))
        if self._first is not None:
            self._first.before_backward(loss)
        if self._weights is not None:
            self._weights.refuse_apart_behind(loss)
        return super().before_backward(loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's backward, which reduces; Lightning has divided by the accumulation already."""
        with torch.autocast(self.device.type, enabled=False):  # manual optimization calls it within training_step
            self._running.backward(loss, *args, **kwargs)

    def after_backward(self) -> None:
        """Under manual optimization, whoever looks for gradients, which are in partitions, is told until the step."""
        if self.manual and not self._watching:
            self._watching = True
            self._reads.__enter__()

    @contextmanager
    def training_step(self) -> Generator[None, None, None]:
        """Before it, see what hooks did to weights; however it ends, afterwards nobody is told any more.

        The first sees what half weights are used for.
        """
        self.check_weights()
        watch = CastAlone(self.halves, to_torch(self.policy.compute_dtype)) if self.halves else nullcontext()
        self.halves = MappingProxyType({})
        try:
            with super().training_step(), watch:
                yield
        finally:
            self._tell_no_more()

    @contextmanager
    def _first_step(self, module: nn.Module) -> Generator[None, None, None]:
        reads = super()._first_step(module)
        if self._weights is None or not self._weights.partitioned or any(map(is_compiled, module.modules())):
            with reads:
                yield
            return
        with reads, ShardReads(module.named_parameters(), lambda one: not one.numel(), silent=True):
            yield

    def _tell_no_more(self) -> None:
        if self._watching:
            self._reads.__exit__(None, None, None)
            self._watching = False

    def unscale(self, optimizer: Optimizer) -> None:
        """Left to the step, which divides by the plan's scale and asks every rank."""
        self._require_tracked("ZeRO")
        self._tell_no_more()
        if self.scaler.enabled and self.scaler.stepped(optimizer):
            self.scaler.update()

    def check_finite_again(self, optimizer: Optimizer) -> None:
        """Nothing: DeepSpeed looks in its step, and what an offloaded partition holds by now is not to be divided."""

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Have the step clip by the norm over all partitions."""
        self._running.clip(max_norm)

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        """ZeRO has no clipping by value.

        Raises:
            RuntimeError: always.
        """
        fault = Fault("clip_gradients(gradient_clip_algorithm='value') with ZeRO", "'norm'", "clip by norm")
        raise RuntimeError(str(fault))

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Let DeepSpeed step or skip, and count what it did.

        Raises:
            RuntimeError: ``training_step`` returned None where a window of accumulation ends: no gradient was reduced.
        """
        zero, weights = self._running, cast("Weights", self._weights)
        if not zero.at_boundary():
            fault = Fault(
                "a training_step that returned None on the last batch of a window of accumulation with ZeRO, which "
                "reduces in that batch's backward pass",
                "None where accumulate_grad_batches=1, or on other batches",
                "return a loss of zero, (parameter * 0).sum(), or use strategy='mp_fsdp2'",
            )
            raise RuntimeError(str(fault))
        weights.refuse_unfrozen()
        weights.refuse_left_out(zero.keeps_moments())
        if self._weights_changed(weights):
            refresh_masters(zero.optimizer, except_of=HalfCopy)
        for place, origin in enumerate(self.came_from):  # a group split off steps with what the first piece has by now
            if self.came_from.index(origin) != place:
                zero.copy_group(self.came_from.index(origin), place)
        self.pending = False
        self._in_step = True
        try:
            applied, norm = zero.step()
        finally:
            self._in_step = False
        weights.stepped()
        self._note_sums()
        zero.clip(self._default_clip)
        self.scaler.note_step(optimizer, torch.full((), float(not applied), dtype=torch.float32, device=self.device))
        self.last_norm = None if norm is None else torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    @property
    def _running(self) -> Zero:
        assert self._zero is not None
        return self._zero

    def _weights_changed(self, weights: Weights) -> bool:
        """Whether masters have to follow weights, which a user's hook may have changed; refreshing costs one copy."""
        weights.refuse_lost()
        if weights.partitioned:
            return weights.take_change()
        # Under offload the copy would cross the bus; this step waits for the device in any case.
        return not self._running.offloads or not torch.equal(partition_sums(self._running.optimizer), self._sums)

    def _note_sums(self) -> None:
        if not cast("Weights", self._weights).partitioned and self._running.offloads:
            self._sums = partition_sums(self._running.optimizer)

    def check_weights(self) -> None:
        """Look whether a user changed weights where nothing holds them.

        Raises:
            RuntimeError: the name of one.
        """
        if self._weights is not None:
            self._weights.refuse_lost()

    def _raw_step(self, own: Any, closure: Any = None) -> None:
        """Refuse a step of the ZeRO optimizer that is called past DeepSpeed's engine, which reduces and counts."""
        if not self._in_step:
            self._refuse_untracked(self._running.optimizer, (), {})
        own(closure)

    def release(self) -> None:
        """Drop the DeepSpeedEngine too."""
        super().release()
        if self._first is not None:
            self._first.release()
        if self._weights is not None:
            self._weights.release()
            self._running.restore()
        self._zero = self._weights = self._first = None
