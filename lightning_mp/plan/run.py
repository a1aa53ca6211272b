"""The read-only state of a ``MixedPrecisionPlan``, and the code at the start and end of a fit."""

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
    """The state of one Trainer's run under a plan: policy, loss scale and counts.

    While the run lasts, it also has the engine, and in ``cleanup`` the functions that undo changes.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.device = torch.device("cpu")
        self.engine: StepEngine | None = None
        self.fp8_layers: list[FP8Layer] = []
        #: True if the last call of optimizer_step made a step; False if training_step returned None
        self.stepped = False
        #: True if a user's hook may change gradients before the step; unset until the first step
        self.checks_again: bool | None = None
        #: steps and applied steps before this fit's first step, from a checkpoint or an earlier fit
        self.attempts_before = self.applied_before = 0
        self.cleanup = ExitStack()
        #: the run's Trainer; another Trainer gets a run of its own
        self.attached: weakref.ref[Trainer] | None = None
        self.follow(policy)

    def follow(self, policy: PrecisionPolicy) -> None:
        """Set the policy, with a new loss scaler at its initial scale. Counts start from 0."""
        self.policy = policy
        rule = None if policy.precision == "auto" else policy.loss_scaling
        self.loss_scaler = LossScaler(rule, on_step=self._on_step)
        self.storage_dtype = to_torch(policy.storage_dtype)
        self.half_storage = self.storage_dtype != torch.float32
        self.autocast_dtype = to_torch(policy.compute_dtype) if policy.mixed else None

    @property
    def trainer(self) -> Trainer | None:
        """Return the run's Trainer; ``None`` before ``attach``, or once the Trainer was deleted."""
        return None if self.attached is None else self.attached()

    def attach(self, trainer: Trainer) -> None:
        """Set the run's Trainer and its device. A weak reference is kept."""
        self.device, self.attached = trainer.strategy.root_device, weakref.ref(trainer)

    def begin(self, engine: StepEngine, module: nn.Module) -> None:
        """Set the engine and let it prepare ``module``.

        ``module`` is changed in place. Fast paths of torch that skip a module's hooks are switched
        off. ``release`` undoes all changes except pins and the dtypes of weights.
        """
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
        """Prepare for the first step of a fit.

        Schedulers and weight averages will not advance in a skipped step.
        """
        self.checks_again = may_change_gradients(module)
        self.attempts_before, self.applied_before = self.loss_scaler.attempts, self.loss_scaler.applied_steps
        undo = hold_on_skips(module.trainer, module, lambda: self.stepped and self.loss_scaler.step_skipped)
        self.cleanup.callback(undo)

    def release(self) -> None:
        """End the run: drop the engine, and undo its changes to the process and the module.

        Pins and the dtypes of weights stay.
        """
        self.engine = self.checks_again = None
        self.cleanup.close()

    def _on_step(self) -> None:
        if self.engine is not None:
            self.engine.check_budget(None)


class _KeyOfNoCallback(str):
    """The ``state_key`` of a plan, which may be read but not used.

    A Trainer puts the ``state_key`` of each of its callbacks into a set.
    """

    __slots__ = ()

    def __hash__(self) -> int:
        """Raise a PlanError: the plan is among a Trainer's callbacks."""
        raise PlanError.of("callbacks=[MixedPrecisionPlan(...)]", "write Trainer(plugins=[plan])", "Trainer")


class PlanBase:
    """The base class of plans, for ``isinstance`` checks. It has their read-only state."""

    _declared: PrecisionPolicy
    _run: Run
    _last: list[Run]

    @property
    def policy(self) -> PrecisionPolicy:
        """Return the declared policy.

        In a run, ``auto`` is resolved, and values of the strategy's own config are added.
        """
        return self._run.policy

    @property
    def precision(self) -> Any:
        """Return the policy's mode, such as ``"bf16-mixed"``."""
        return self._run.policy.precision

    @property
    def engine(self) -> StepEngine | None:
        """Return the engine that carries out the plan; ``None`` outside of a run."""
        return self._run.engine

    @property
    def loss_scaler(self) -> LossScaler:
        """Return the loss scale with the counts of applied and skipped steps.

        In a mode without loss scaling it is disabled, and still counts.
        """
        run = self._run if self._run.attached or not self._last else self._last[0]  # a copy ran
        return run.loss_scaler

    @property
    def scaler(self) -> LossScaler | None:
        """Return ``loss_scaler``, or ``None`` in a mode without loss scaling."""
        return self.loss_scaler if self.loss_scaler.enabled else None

    @property
    def fp8_layers(self) -> list[FP8Layer]:
        """Return every Linear and Conv1D of an ``"fp8-mixed"`` run, converted or with a reason.

        The list is empty before the run, and in another mode.
        """
        return list(self._run.fp8_layers)

    @property
    def step_skipped(self) -> bool:
        """True if the last optimizer step was skipped.

        The first read after a step is a device sync.
        """
        return self.loss_scaler.step_skipped

    @property
    def skipped_steps(self) -> int:
        """Return the number of skipped optimizer steps, also before a resume."""
        return self.loss_scaler.skipped_steps

    @property
    def applied_steps(self) -> int:
        """Return the number of applied optimizer steps, also before a resume."""
        return self.loss_scaler.applied_steps

    @property
    def trainer(self) -> Trainer | None:
        """Return the Trainer of the present or last run; ``None`` without one that still exists."""
        return self._run.trainer

    @property
    def last_grad_norm(self) -> Tensor | None:
        """Return the global gradient norm before the last clipping by norm.

        It is an fp32 scalar on the device. ``None`` is returned outside of a run, or if no gradient
        was clipped by norm yet.
        """
        return None if self.engine is None else self.engine.last_norm

    def same_as(self, other: object) -> bool:
        """True if ``other`` is a plan of the same class and the same declared policy.

        The two plans are then interchangeable.
        """
        return type(other) is type(self) and cast("PlanBase", other)._declared == self._declared

    def state_dict(self) -> dict[str, Any]:
        """Return the declared policy, the counts and the loss scale, as plain values.

        In a run, ``"fp32"`` has the names of weights that stay fp32 in a half-precision file, if
        any.
        """
        scaler = {} if self.scaler is None else {"scaler": self.scaler.state_dict()}
        fp32 = {"fp32": names} if self.engine is not None and (names := self.engine.fp32_names()) else {}
        values = {"policy": self._declared.to_dict(), "steps": self.loss_scaler.counts(), **scaler, **fp32}
        return file_format.stamped(values)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from counts and loss scale. The policy is not loaded.

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
        """Replace torchao's tensors in ``checkpoint`` by a form that every strategy can load.

        These are quantized optimizer states and weights. The dict is changed in place.
        """
        if "torchao" in sys.modules:  # otherwise no tensor is torchao's
            for key in checkpoint.keys() & {"state_dict", "optimizer_states"}:
                checkpoint[key] = map_tensors(checkpoint[key], loadable_anywhere)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load the loss scale of a checkpoint that stock Lightning wrote under ``16-mixed``.

        The checkpoint of a plan is only checked. Its state comes through ``load_state_dict``.

        Raises:
            PlanError: a newer release of this package wrote the checkpoint.
        """
        if said := file_format.newer(checkpoint.get(file_format.NOTES)):
            raise PlanError.of(f"the checkpoint {said}", f"{file_format.UPDATE}, or resume from another checkpoint")
        if self.scaler is None or type(self).__qualname__ in checkpoint:
            return
        for key in ("MixedPrecision", "FSDPPrecision"):  # keys of stock plugins with a GradScaler
            if "scale" in checkpoint.get(key, {}):
                self.scaler.load_state_dict(checkpoint[key])

    @property
    def state_key(self) -> str:
        """Return a key that raises a PlanError if a Trainer takes the plan for a callback."""
        return _KeyOfNoCallback(type(self).__qualname__)

    def describe(self, module: nn.Module | None = None) -> str:
        """Return the policy as a table of text: its dtypes, pins and rules.

        With ``module``, or within a run, pins and checkpointing are listed with the modules they
        cover.
        """
        return describe.as_text(self._described(module))

    def _repr_html_(self) -> str:
        return describe.as_html(self._described(None))

    def _described(self, module: nn.Module | None) -> describe.Rows:
        if module is None and self.engine is not None and self.trainer is not None:
            return describe.rows(self.policy, self.trainer.lightning_module, self.fp8_layers)
        return describe.rows(self.policy, module)


def began(engine: StepEngine, module: nn.Module, trainer: Trainer) -> None:
    """Print the policy on rank 0, and give it to the loggers as a hyperparameter."""
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
    """Raise NonFiniteError if a fit that ran to its end applied none of its steps.

    Steps of the checkpoint that it resumed from, and of an earlier fit, do not count. With loss
    scaling and at most ``SEARCH_SKIPS`` steps this is a warning, because the scale may still fall.
    Nothing happens after an interruption, or if no step was tried.

    Raises:
        NonFiniteError: every step was skipped.
    """
    trainer, scaler = run.trainer, run.loss_scaler
    fitted = trainer is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted
    if not fitted or run.engine is None or run.checks_again is None:  # the last: there was no step
        return
    tried = scaler.attempts - run.attempts_before
    if tried and scaler.applied_steps == run.applied_before:
        error = diagnosis.applied_none(tried, scaler.get_scale() if scaler.enabled else None)
        if not scaler.enabled or tried > diagnosis.SEARCH_SKIPS:
            raise error
        rank_zero_warn(str(error))
