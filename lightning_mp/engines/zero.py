"""The step under DeepSpeed's ZeRO: its optimizer shards, reduces and updates; scale, skips and counts are the plan's.

DeepSpeed's own fp16 and bf16 engines cast every parameter, adjust the scale before they divide by it, and stop at the
smallest scale. None of them runs here: parameters are stored as the policy says, autocast and pins compute, and the
ZeRO optimizer asks the plan's scaler what to divide by.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.compat.deepspeed import cast_partition
from lightning_mp.compat.lightning import trainer_of
from lightning_mp.engines import optimizer_facts
from lightning_mp.engines.eager import EagerEngine
from lightning_mp.errors import Faults


class ZeroEngine(EagerEngine):
    """Carries a policy out through a ``deepspeed.DeepSpeedEngine`` with ZeRO stage 1, 2 or 3."""

    #: the DeepSpeedEngine and its ZeRO optimizer, typed by nobody
    _deepspeed: Any = None
    _zero: Any = None
    #: what tells the ZeRO optimizer the plan's scale
    _scale: Any = None
    #: ``gradient_clipping`` of the JSON, where the Trainer says nothing
    _default_clip = 0.0

    def check(self, module: nn.Module, faults: Faults) -> None:
        """Match patterns, and refuse what a ZeRO optimizer cannot be made to do."""
        super().check(module, faults)
        if self.policy.nonfinite.action == "ignore":
            faults.add(
                "nonfinite='ignore' with ZeRO",
                "'skip' or 'raise': a ZeRO optimizer does not step on a gradient norm that is not finite",
                "use nonfinite='skip', or strategy='mp_fsdp2'",
            )

    def prepare(self, module: nn.Module) -> None:
        """Cast, pin and checkpoint, before DeepSpeed flattens and partitions."""
        before = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
        super().prepare(module)
        self._before = before

    def check_optimizer(self, optimizer: Optimizer, faults: Faults) -> None:
        """Note why a ZeRO optimizer cannot stand in for ``optimizer``, which is known only after ``prepare``."""
        if optimizer_facts.calls_closure_again(optimizer) or optimizer_facts.takes_closure(optimizer):
            faults.add(
                f"{type(optimizer).__name__} with ZeRO, whose step takes no closure",
                "an optimizer that does not evaluate the closure itself",
                "use AdamW or SGD, or strategy='mp_ddp'",
            )

    def take_back(self) -> None:
        """Bring the module back to what ``prepare`` found."""
        self._revert()

    def give_away(self) -> None:
        """DeepSpeed takes the module now: it cannot be brought back any more."""
        self._before = []
        for parameter in () if self._module is None else self._module.parameters():
            cast_partition(parameter)  # of those made partitioned, a pin has cast the empty shell

    def connect(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Take the DeepSpeedEngine and its optimizer, and put the plan's scale in place of DeepSpeed's."""
        super().connect(model, [])
        self.optimizers = list(optimizers)
        if not optimizers:  # validation
            return
        self._deepspeed, self._zero = cast("Any", model), cast("Any", optimizers[0])
        trainer = trainer_of(self._module)
        if trainer is None or trainer.gradient_clip_val is None:  # else Lightning asks for it, or the user's hook
            self._default_clip = float(self._zero.clip_grad)
        self._zero.clip_grad = self._default_clip
        self.take_over()

    def take_over(self) -> None:
        """Put the plan's scale in place of DeepSpeed's, again after it loaded a checkpoint with its own."""
        if self._zero is None:
            return
        if self.scaler is not None:
            from lightning_mp.engines.zero_scale import PlanScale  # needs deepspeed

            self._scale = self._zero.loss_scaler = PlanScale(self.scaler)
        if self._zero.dtype == torch.bfloat16 or not getattr(self._zero, "compute_grad_norm", True):
            self._zero.check_grad_overflow = True  # else gradients are never asked whether they are finite
        self._zero.clip_grad = self._default_clip  # a checkpoint brings that of the run that wrote it

    # ------------------------------------------------------------------ the step

    def before_backward(self, loss: Tensor, *, manual: bool) -> Tensor:
        """The loss, times the scale where there is one.

        Raises:
            RuntimeError: under manual optimization, a second backward pass before a step: ZeRO would lose the first.
        """
        if manual and self.pending:
            raise RuntimeError(
                "given two manual_backward() before a step with ZeRO; allowed: one, since each reduces and partitions "
                "the gradients anew; do: add the losses up, or use strategy='mp_fsdp2'"
            )
        self.pending, self._loss = True, loss.detach()
        return loss if self.scaler is None else self.scaler.scale(loss)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> bool:
        """DeepSpeed's backward, which reduces; Lightning has divided by the accumulation already."""
        with torch.autocast(self.device.type, enabled=False):  # manual optimization calls it within training_step
            self._deepspeed.backward(loss, *args, scale_wrt_gas=False, **kwargs)
        return True

    def after_backward(self, *, manual: bool) -> None:
        """Nothing: gradients are in DeepSpeed's partitions, where users do not look."""

    def steps_with_closure(self, optimizer: Optimizer) -> bool:
        """A ZeRO optimizer takes no closure."""
        return False

    def may_call_closure(self, optimizer: Optimizer) -> bool:
        """A ZeRO optimizer takes no closure."""
        return False

    def unscale(self, optimizer: Optimizer) -> None:
        """Left to the step, which divides by the plan's scale and asks every rank."""
        if self.scaler is not None and self.scaler.stepped(optimizer):
            self.scaler.update()

    def clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        """Have the step clip by the norm over all partitions."""
        self._zero.clip_grad = max_norm

    def clip_value(self, optimizer: Optimizer, value: float) -> None:
        """ZeRO has no clipping by value.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "given clip_gradients(gradient_clip_algorithm='value') with ZeRO; allowed: 'norm'; do: clip by norm"
        )

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Let DeepSpeed step or skip, and count what it did.

        Raises:
            RuntimeError: ``training_step`` returned None where a window of accumulation ends: no gradient was reduced.
        """
        if not self._deepspeed.is_gradient_accumulation_boundary():
            raise RuntimeError(
                "given a training_step that returned None on the last batch of a window of accumulation with ZeRO, "
                "which reduces in that batch's backward pass; allowed: None where accumulate_grad_batches=1, or on "
                "other batches; do: return a loss of zero, (parameter * 0).sum(), or use strategy='mp_fsdp2'"
            )
        self.pending = False
        with nullcontext() if self._scale is None else self._scale.held():
            self._deepspeed.step()
        self._zero.clip_grad = self._default_clip
        found = self._one.new_full((), float(not self._deepspeed.was_step_applied()))
        self.ledger.open(found)
        if self.scaler is None:
            self.ledger.record(found)
        else:
            self.scaler.note_step(optimizer, found)
            self.record(found)
        norm = self._deepspeed.get_global_grad_norm()
        self.last_norm = None if norm is None else torch.as_tensor(norm, dtype=torch.float32, device=self.device)

    def release(self) -> None:
        """Let go of the DeepSpeedEngine too."""
        super().release()
        self._deepspeed = self._zero = self._scale = None
