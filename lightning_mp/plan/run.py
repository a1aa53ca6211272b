"""What monitors and people may read of a ``MixedPrecisionPlan``, and what a fit under it begins and ends with."""

from __future__ import annotations

import sys
import weakref
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_mp.compat.lightning import (
    LightningModule,
    Trainer,
    TrainerFn,
    rank_zero_info,
    rank_zero_warn,
    trainer_of,
)
from lightning_mp.compat.torch import attention_calls_its_modules, backward_traced_outside_autocast
from lightning_mp.compat.torchao import loadable_anywhere
from lightning_mp.errors import PlanError
from lightning_mp.modules.fp8 import FP8Layer
from lightning_mp.modules.patterns import call_with_original_classes
from lightning_mp.numerics.dtypes import map_tensors, to_torch
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.plan import describe, diagnosis
from lightning_mp.plan.engine import StepEngine
from lightning_mp.plan.hyperparameters import log_plan
from lightning_mp.plan.skip_aware import Override, hold_on_skips, may_change_gradients
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.record import file_format


class Run:
    """One Trainer's run under a plan: policy, loss scale and counts; while it lasts, the engine and what undoes it."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.device = torch.device("cpu")
        self.engine: StepEngine | None = None
        self.fp8_layers: list[FP8Layer] = []
        #: whether the last call of optimizer_step made a step; it does not where training_step returned None
        self.stepped = False
        #: whether hooks of the user's may change gradients before the step; known from the first step on
        self.checks_again: bool | None = None
        #: steps, and applied steps, before the first step of this fit: those of a checkpoint or of an earlier fit
        self.attempts_before = self.applied_before = 0
        self.cleanup = ExitStack()
        #: its Trainer, or the one that it had: another one gets a run of its own
        self.attached: weakref.ref[Trainer] | None = None
        self.follow(policy)

    def follow(self, policy: PrecisionPolicy) -> None:
        """Take ``policy``, and its loss scale from the start."""
        self.policy = policy
        rule = None if policy.precision == "auto" else policy.loss_scaling
        self.loss_scaler = LossScaler(rule, on_step=self._on_step)
        self.storage_dtype = to_torch(policy.storage_dtype)
        self.half_storage = self.storage_dtype != torch.float32
        self.autocast_dtype = to_torch(policy.compute_dtype) if policy.mixed else None

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer, while it lives."""
        return None if self.attached is None else self.attached()

    def attach(self, trainer: Trainer) -> None:
        """``trainer`` begins, or goes on to its next stage."""
        self.device, self.attached = trainer.strategy.root_device, weakref.ref(trainer)

    def begin(self, engine: StepEngine, module: nn.Module) -> None:
        """Change the module, and switch off what would go past it."""
        trainer = trainer_of(module)
        self.engine, self.fp8_layers = engine, engine.fp8_layers
        self.cleanup.callback(engine.release)
        self.cleanup.enter_context(backward_traced_outside_autocast())
        engine.prepare(module)
        if (self.policy.pins or self.policy.mixed) and trainer is not None:
            self.cleanup.enter_context(attention_calls_its_modules())
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            run = partial(call_with_original_classes, module)
            self.cleanup.callback(Override(module, "configure_optimizers", run).remove)

    def begin_steps(self, module: LightningModule) -> None:
        """In the first step: schedulers and weight averages will not move on a skipped one."""
        self.checks_again = may_change_gradients(module)
        self.attempts_before, self.applied_before = self.loss_scaler.attempts, self.loss_scaler.applied_steps
        undo = hold_on_skips(module.trainer, module, lambda: self.stepped and self.loss_scaler.step_skipped)
        self.cleanup.callback(undo)

    def release(self) -> None:
        """Restore every process-global that was set, and the methods that were changed."""
        self.engine = self.checks_again = None
        self.cleanup.close()

    def _on_step(self) -> None:
        if self.engine is not None:
            self.engine.check_budget(None)


class _NoCallbackError(PlanError, AttributeError):
    """A plan among a Trainer's callbacks; for ``hasattr`` and debuggers the attribute is not there."""


class PlanBase:
    """The base class by which a precision plugin is known to be a plan."""

    _declared: PrecisionPolicy
    _run: Run
    _last: list[Run]

    @property
    def policy(self) -> PrecisionPolicy:
        """What is declared; of a run, with what ``auto`` and the strategy's own config have added."""
        return self._run.policy

    @property
    def precision(self) -> Any:
        """The policy's mode."""
        return self._run.policy.precision

    @property
    def engine(self) -> StepEngine | None:
        """What carries the plan out on the strategy at hand, while a run lasts."""
        return self._run.engine

    @property
    def loss_scaler(self) -> LossScaler:
        """The loss scale and the counts of applied and skipped steps; disabled in a mode without loss scaling."""
        run = self._run if self._run.attached or not self._last else self._last[0]  # that of a copy
        return run.loss_scaler

    @property
    def scaler(self) -> LossScaler | None:
        """The same; ``None`` in a mode without loss scaling."""
        return self.loss_scaler if self.loss_scaler.enabled else None

    @property
    def fp8_layers(self) -> list[FP8Layer]:
        """Under ``"fp8-mixed"``, once a run began: every Linear and Conv1D, converted or left with the reason."""
        return list(self._run.fp8_layers)

    @property
    def step_skipped(self) -> bool:
        """Whether the last optimizer step was skipped; the first question after a step is a device sync."""
        return self.loss_scaler.step_skipped

    @property
    def skipped_steps(self) -> int:
        """How many optimizer steps were skipped since the run began."""
        return self.loss_scaler.skipped_steps

    @property
    def applied_steps(self) -> int:
        """How many optimizer steps were applied since the run began."""
        return self.loss_scaler.applied_steps

    @property
    def trainer(self) -> Trainer | None:
        """The Trainer of the present run, or of the last one while it lives."""
        return self._run.trainer

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global gradient norm of the last clipping by norm, before it: an fp32 scalar on the device."""
        return None if self.engine is None else self.engine.last_norm

    def same_as(self, other: object) -> bool:
        """Whether ``other`` is a plan of the same class that declares the same policy: either may run for the other."""
        return type(other) is type(self) and cast("PlanBase", other)._declared == self._declared

    def state_dict(self) -> dict[str, Any]:
        """The policy, the counts and the loss scale, and in a run which weights stay fp32; plain values only."""
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        fp32 = {"fp32": names} if self.engine is not None and (names := self.engine.fp32_names()) else {}
        values = {"policy": self._declared.to_dict(), "steps": self.loss_scaler.counts(), **scaler, **fp32}
        return file_format.stamped(values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from counts and loss scale; the policy stays the one declared now.

        Raises:
            PlanError: a newer release of this package wrote ``state_dict``.
        """
        if said := file_format.newer(state_dict):
            raise PlanError.of(
                f"the plan's state in the checkpoint {said}", f"{file_format.UPDATE}, or resume from another checkpoint"
            )
        self.loss_scaler.load_counts(state_dict["steps"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict.get("scaler", {}))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Have torchao's optimizer states and quantized weights saved in a form that every strategy can load."""
        if "torchao" in sys.modules:  # else there are none
            for key in checkpoint.keys() & {"state_dict", "optimizer_states"}:
                checkpoint[key] = map_tensors(checkpoint[key], loadable_anywhere)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adopt the scale of a checkpoint that stock Lightning wrote under ``16-mixed``.

        Raises:
            PlanError: a newer release of this package wrote the checkpoint.
        """
        if said := file_format.newer(checkpoint.get(file_format.NOTES)):
            raise PlanError.of(f"the checkpoint {said}", f"{file_format.UPDATE}, or resume from another checkpoint")
        if self.scaler is None or type(self).__qualname__ in checkpoint:
            return
        for key in ("MixedPrecision", "FSDPPrecision"):  # where stock plugins keep a GradScaler's state
            if "scale" in checkpoint.get(key, {}):
                self.scaler.load_state_dict(checkpoint[key])

    @property
    def state_key(self) -> str:
        """Always raise ``_NoCallbackError``: a Trainer asks its callbacks for this."""
        raise _NoCallbackError.of("callbacks=[MixedPrecisionPlan(...)]", "write Trainer(plugins=[plan])", "Trainer")

    def describe(self, module: nn.Module | None = None) -> str:
        """What is declared, as a table: what is stored, computed, reduced and kept in which dtype, and by what rules.

        With ``module``, or within a run, each pin and the checkpointing come with the modules they cover.
        """
        return describe.as_text(self._described(module))

    def _repr_html_(self) -> str:
        return describe.as_html(self._described(None))

    def _described(self, module: nn.Module | None) -> describe.Rows:
        if module is None and self.engine is not None and self.trainer is not None:
            return describe.rows(self.policy, self.trainer.lightning_module, self.fp8_layers)
        return describe.rows(self.policy, module)


def began(engine: StepEngine, module: nn.Module, trainer: Trainer) -> None:
    """Say on rank 0 what is declared, and give it to the loggers, so that runs can be filtered by it."""
    for line in describe.announcement(engine.policy, module, engine.fp8_layers):
        rank_zero_info(line)
    if engine.policy.precision == "16-true":
        # fp16's smallest normal number is 2**-14, and half of its smallest one, 2**-25, is rounded to 0
        rank_zero_info(
            "16-true divides gradients by the loss scale in fp16: below 6e-5 they lose bits, below 3e-8 they become 0; "
            "'16-mixed' has them in fp32"
        )
        rank_zero_info("An optimizer's eps=1e-8 is 0 in fp16: set eps=1e-4, or fused=True")
    log_plan(engine.policy, trainer)


def ended(run: Run) -> None:
    """Look, at the end of a fit that did not fail, at whether any of the steps of this fit was applied.

    Steps of the checkpoint that it resumed from, and of an earlier fit of the Trainer, do not count.

    Raises:
        NonFiniteError: none was applied. Where fp16 may not have found its loss scale yet, this is a warning.
    """
    trainer, scaler = run.trainer, run.loss_scaler
    fitted = trainer is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted
    if not fitted or run.engine is None or run.checks_again is None:  # the last: no step was tried
        return
    tried = scaler.attempts - run.attempts_before
    if tried and scaler.applied_steps == run.applied_before:
        error = diagnosis.applied_none(tried, scaler.get_scale() if scaler.enabled else None)
        if not scaler.enabled or tried > diagnosis.SEARCH_SKIPS:
            raise error
        rank_zero_warn(str(error))
