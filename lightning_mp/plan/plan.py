"""``MixedPrecisionPlan``: the Lightning precision plugin that binds a policy to an engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.compat import require_versions
from lightning_mp.compat.lightning import (
    FSDPPrecision,
    LightningModule,
    ParallelStrategy,
    RunningStage,
    Trainer,
    TrainerFn,
    TrainerStatus,
    rank_zero_warn,
    tidy_output,
    trainer_of,
)
from lightning_mp.deepspeed.merge import DeepSpeedJson, DeepSpeedNotes
from lightning_mp.errors import Faults, PlanError, near_keywords
from lightning_mp.numerics.dtypes import cast_floating, default_dtype, describe
from lightning_mp.plan import alike, diagnosis, for_strategy
from lightning_mp.plan.closures import EvaluatedClosure
from lightning_mp.plan.engine import NOTHING, StepEngine
from lightning_mp.plan.run import PlanBase, Run, began, ended
from lightning_mp.policy import PrecisionPolicy, load, precision_policy
from lightning_mp.policy.pieces import call
from lightning_mp.policy.precision_policy import (
    CheckpointingLike,
    FP8Like,
    LossScalingLike,
    NonFiniteLike,
    PinsLike,
    Precision,
)
from lightning_mp.record import file_format

if TYPE_CHECKING:
    from lightning_mp.bad_steps.handler import BadStepCallback


class MixedPrecisionPlan(DeepSpeedJson, PlanBase, FSDPPrecision):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A Lightning precision plugin with a policy.

    Use it as ``Trainer(plugins=[MixedPrecisionPlan("16-mixed")])``.

    It is a ``FSDPPrecision`` only so that every stock strategy accepts it. No code of that class
    is used.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``,
            ``"fp8-mixed"`` or ``"auto"``. Other spellings are accepted too (``16``, ``"fp16"``,
            ``"bf16"``).
        loss_scaling: the rule of the loss scale, for the fp16 modes and ``"auto"``. A
            :class:`LossScaling` or a mapping of its fields.
        pins: module patterns with the dtype in which a module is stored and run,
            ``{"*norm*": "fp32"}``. The first match wins.
        tf32: ``True`` or ``"high"`` lets fp32 products run in TF32. ``False`` or ``"highest"``
            forbids it. ``"medium"`` is torch's setting of that name. ``None`` leaves torch's
            setting as it is.
        checkpointing: the modules that recompute their activations. A pattern, a
            :class:`Checkpointing` or a mapping of its fields.
        fp8: the rule of the FP8 products, for ``"fp8-mixed"``. A recipe's name, an :class:`FP8`
            or a mapping of its fields.
        nonfinite: the treatment of a step with non-finite gradients. ``"skip"``, ``"raise"``,
            ``"ignore"``, a :class:`NonFinite` or a mapping of its fields.
        reduce_dtype: the dtype in which gradients are summed over ranks, fp32 by default.
        buffer_dtype: the dtype of floating buffers. By default the true modes cast them to the
            dtype of the parameters, and the other modes leave them unchanged.

    Raises:
        PlanError: an argument is unknown, or has a bad value. All unknown arguments are reported
            together; without any, all bad values.
    """

    @near_keywords
    def __init__(
        self,
        precision: Precision | str | int = "bf16-mixed",
        *,
        loss_scaling: LossScalingLike = None,
        pins: PinsLike = None,
        tf32: str | bool | None = None,
        checkpointing: CheckpointingLike = None,
        fp8: FP8Like = None,
        nonfinite: NonFiniteLike = "skip",
        reduce_dtype: str | None = None,
        buffer_dtype: str | None = None,
    ) -> None:
        dtypes: dict[str, Any] = {"precision": precision, "tf32": tf32, "reduce_dtype": reduce_dtype or "fp32"}
        steps: dict[str, Any] = {"loss_scaling": loss_scaling, "nonfinite": nonfinite, "buffer_dtype": buffer_dtype}
        modules: dict[str, Any] = {"pins": pins, "checkpointing": checkpointing, "fp8": fp8}
        self._declare(PrecisionPolicy(**dtypes, **steps, **modules))

    #: keys of a saved plan that are no fields of a policy; with any, :meth:`apply` refuses the plan
    _unknown_keys: Sequence[str] = ()

    def _declare(self, policy: PrecisionPolicy) -> None:
        self._declared, self._run = policy, Run(policy)
        # The run of each live Trainer. The list holds the last run; copies of the plan share it.
        self._runs, self._last = WeakKeyDictionary[Trainer, Run](), list[Run]()

    @classmethod
    def from_policy(cls, policy: PrecisionPolicy) -> MixedPrecisionPlan:
        """Return a plan with ``policy``."""
        plan = cls.__new__(cls)
        plan._declare(policy)
        return plan

    @classmethod
    def preset(cls, name: str) -> MixedPrecisionPlan:
        """Return a plan by name.

        Names: fp32, tf32, bf16, fp16, bf16_true, fp16_true, longspec, v100, t4, a100, h100, b200.

        Raises:
            PlanError: an unknown name.
        """
        return cls.from_policy(precision_policy.preset(name))

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | int | PathLike[str]) -> MixedPrecisionPlan:
        """Return a plan from ``config``.

        ``config`` is a mapping of the plan's arguments, an OmegaConf ``DictConfig``, the path of a
        YAML file, or a precision.

        Raises:
            PlanError: the file cannot be read, a key is unknown, or a value is bad. Unknown keys
                and bad values are reported together. A fault of a YAML file names the line of its
                key if that is known.
        """
        with load.named_lines(config):
            return cls.from_policy(PrecisionPolicy.from_dict(load.plain_mapping(config)))

    def __getstate__(self) -> dict[str, Any]:
        # Plain values only, because torch.load(weights_only=True) refuses others.
        own = file_format.stamped({"_declared": self._declared.to_dict()})
        if self.deepspeed_notes is not None:
            own["deepspeed_notes"] = asdict(self.deepspeed_notes)
        runs = ("_run", "_runs", "_last")
        return {name: value for name, value in vars(self).items() if name not in runs} | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        if said := file_format.newer(state):
            raise PlanError.of(f"a saved plan {said}", file_format.UPDATE)
        state.pop(file_format.KEY, None)
        policy, unknown = PrecisionPolicy.from_saved(state.pop("_declared"))
        self._declare(policy)
        vars(self).update(state)
        if unknown:
            self._unknown_keys = unknown
        if "deepspeed_notes" in state:
            self.deepspeed_notes = DeepSpeedNotes(**state["deepspeed_notes"])

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedPrecisionPlan:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(self.__getstate__())
        # Packages copy their arguments. The user's plan then reads the counts of the copy's run.
        copied._last = self._last
        return copied

    @property
    def device(self) -> str:
        """Return the type of the run's device (``"cuda"``), as ``MixedPrecision.device`` does.

        Before a run it is ``"cpu"``.
        """
        return self._run.device.type

    def __repr__(self) -> str:
        precision, *others = self._declared.arguments().items()
        return call(type(self).__name__, dict(others), precision[1])

    # ------------------------------------------------------------------ the module

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Call :meth:`apply` and return ``module``. Lightning's own strategies call this."""
        self.apply(module)
        return module

    def apply(self, module: nn.Module) -> Any:
        """Check the policy on this module, device and strategy, then change ``module`` in place.

        A run begins: process-wide settings, such as TF32, are changed until :meth:`teardown`. An
        earlier run of the plan is ended first, unless its Trainer is still running. A module that
        is attached to no Trainer is checked for the device of its first parameter. On several ranks
        this is a collective, which compares the plan, the module and the faults of all ranks.

        Returns:
            The value of the strategy's ``check_plan``, such as the units that it will shard.
            ``None`` if there is no Trainer, or if the strategy has no such method.

        Raises:
            PlanError: the policy cannot run on this module, device or strategy. The module is
                unchanged.
            MissingExtraError: ``"fp8-mixed"`` without torchao.
        """
        trainer = trainer_of(module)
        strategy = None if trainer is None else trainer.strategy
        require_versions("MixedPrecisionPlan", *for_strategy.required_hosts(strategy))
        self._attach(trainer, module)
        run, faults = self._run, Faults()
        device = describe(run.device)
        policy = self.policy
        if policy.precision == "auto":
            policy = for_strategy.resolved(policy, device, module)
        policy = for_strategy.completed(strategy, policy)
        if policy != self.policy:
            run.follow(policy)
        if self._unknown_keys:
            problem = f"a saved plan with {', '.join(self._unknown_keys)}, which this lightning-mp does not know"
            faults.add(problem, fix=f"update lightning-mp, or write the plan without: {self!r}")
        for_strategy.check_device(self.policy, device, faults)
        engine = for_strategy.engine_of(strategy)(
            self.policy,
            device=run.device,
            scaler=run.loss_scaler,
            distributed=isinstance(strategy, ParallelStrategy) and strategy.world_size > 1,
        )
        engine.check(module, faults)
        layout, bad_steps = None, None
        if trainer is not None:
            bad_steps = self._check_fit(trainer, engine, module, faults)
            layout = for_strategy.check(trainer.strategy, engine, module, faults)
        if engine.distributed:
            auto_on = device.name if self._declared.precision == "auto" else ""
            alike.compare(repr(self.from_policy(self.policy)), auto_on, module, engine.device, faults)
        faults.raise_if_any()
        for pattern in engine.pin_map.shadowed:
            rank_zero_warn(f"pin {pattern!r} has no effect: the pins before it cover everything it matches")
        if bad_steps is not None:
            run.cleanup.callback(bad_steps.remove)
            bad_steps.insert()
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            # Imported here because it loads much that a plan without a fit does not need.
            from lightning_mp.preflight.fit_checks import warn_at_fit

            warn_at_fit(module, self.policy)
            run.cleanup.enter_context(tidy_output(trainer))
            began(engine, module, trainer)
        run.begin(engine, module)
        restore_tf32 = for_strategy.switch_tf32(self.policy, device)
        if restore_tf32 is not None:
            run.cleanup.callback(restore_tf32)
        return layout

    def _check_fit(
        self, trainer: Trainer, engine: StepEngine, module: nn.Module, faults: Faults
    ) -> BadStepCallback | None:
        """Give ``engine`` the Trainer's stage and, in a fit, the batch norms to synchronize.

        Return the callback for non-finite steps. ``None`` if this is no fit, or if the policy's
        ``nonfinite`` keeps no batches. Problems are added to ``faults``.
        """
        engine.stages = trainer.state, RunningStage.TRAINING
        if trainer.state.fn != TrainerFn.FITTING:
            return None
        engine.synced = for_strategy.synced(trainer.strategy, module, faults)
        if not self.policy.nonfinite.watches:
            return None
        # Imported here because few plans need it, and it loads much.
        from lightning_mp.bad_steps.handler import BadStepCallback

        return BadStepCallback(self, trainer, faults)

    def _attach(self, trainer: Trainer | None, module: nn.Module) -> None:
        """Select the run of ``trainer``: its earlier one, or a new one.

        The run before it is released. It is kept if its Trainer is still running, which then has
        started ``trainer`` inside its own run. Without a Trainer only the device is set.

        Raises:
            PlanError: ``trainer`` runs inside the run of another Trainer on the same module.
        """
        run, before = self._run, self.trainer
        others = run.engine is not None and before is not trainer
        if others and before is not None and before.state.status == TrainerStatus.RUNNING:
            if before.lightning_module is module:
                raise PlanError.of(
                    "a Trainer inside the run of another one, on the same module and under the same plan",
                    "give it copies: copy.deepcopy(module), copy.deepcopy(plan)",
                    "Trainer",
                )
        else:
            run.release()
        if trainer is None:
            first = next(module.parameters(), None)
            run.device = torch.device("cpu") if first is None else first.device
            return
        if run.attached and before is not trainer:
            self._run = self._runs.get(trainer) or Run(self._declared)
        self._run.attach(trainer)
        self._runs[trainer] = self._run
        self._last[:] = [self._run]

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Check ``optimizers`` against the policy, and use them in the steps of a fit.

        Return the three arguments unchanged. Nothing happens before :meth:`apply`.

        Raises:
            PlanError: an optimizer cannot step under the policy. It evaluates its closure again
                under loss scaling or on shards, or it cannot step on shards.
        """
        if self.engine is not None:
            trainer = self.trainer
            # A Trainer that tests after a fit passes the optimizers of that fit. They do not step.
            stepping = trainer is None or trainer.state.fn == TrainerFn.FITTING
            self.engine.connect(model, optimizers if stepping else [])
        return model, optimizers, lr_schedulers

    # ------------------------------------------------------------------ forward

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Return a context in which ``bf16-true`` and ``16-true`` make their dtype torch's default.

        New tensors and modules then have the dtype of the parameters. Under other modes the
        context changes nothing.
        """
        run = self._run
        return default_dtype(run.storage_dtype) if run.half_storage else nullcontext()

    module_init_context = tensor_init_context

    def forward_context(self) -> Any:
        """Return autocast under the mixed modes, else :meth:`tensor_init_context`."""
        run = self._run
        if run.autocast_dtype is None:
            return self.tensor_init_context()
        # Without the weight cache, as in stock Lightning. The cache keeps stale weights and blocks
        # graph capture.
        return torch.autocast(run.device.type, run.autocast_dtype, cache_enabled=False)

    def train_step_context(self) -> Any:
        """Return the forward context. In the first step, raise if a pinned weight is misused.

        The watched step raises a PlanError if a pinned weight runs in another dtype outside its
        module. Under manual optimization with a loss scale, the end of the context also updates
        the scale after optimizers that stepped in it.

        Raises:
            PlanError: a pinned module was replaced during the run.
            RuntimeError: under DDP or FSDP1, parameters were frozen or unfrozen within an
                accumulation window. Under ZeRO, they were at any time in the run.
        """
        engine = self._run.engine
        watch = NOTHING if engine is None else engine.training_step()
        if engine is None or (watch is NOTHING and not engine.manual):
            return self.forward_context()
        return self._watched(engine, watch)

    @contextmanager
    def _watched(self, engine: StepEngine, watch: AbstractContextManager[Any]) -> Generator[None, None, None]:
        with self.forward_context(), watch:
            yield
        if engine.scaler.enabled:
            engine.close_group()

    @contextmanager
    def val_step_context(self) -> Generator[None, None, None]:
        """Enter the forward context. Watch the first step, unless a training step came before.

        Raises:
            PlanError: a pinned weight runs in another dtype outside its module.
        """
        with self.forward_context(), NOTHING if self.engine is None else self.engine.first_step("validation_step"):
            yield

    def convert_input(self, data: Any) -> Any:
        """Cast the floating tensors of ``data`` to the parameters' dtype, and return the result.

        This is for ``bf16-true`` and ``16-true``. Under other modes ``data`` is returned unchanged.
        """
        return cast_floating(data, self._run.storage_dtype) if self._run.half_storage else data

    def convert_output(self, data: Any) -> Any:
        """Cast the floating tensors of ``data`` to torch's default dtype, and return the result.

        This is for ``bf16-true`` and ``16-true``. Under other modes ``data`` is returned unchanged.
        """
        return cast_floating(data, torch.get_default_dtype()) if self._run.half_storage else data

    # ------------------------------------------------------------------ backward and step

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Return the loss times the loss scale, if there is one, and run Lightning's hooks.

        Raises:
            PlanError: there is no Trainer, as under Lightning Fabric, or an optimizer that came
                during the run cannot step under the policy.
        """
        engine = self._run.engine
        if not (engine and engine.optimizers) and self.trainer is None and trainer_of(module) is None:
            raise PlanError.of(
                "Fabric(plugins=[MixedPrecisionPlan(...)]), or a backward pass without a Trainer",
                "use a Trainer, or Fabric(precision=...) without the plan",
            )
        if engine is not None:
            engine.manual = not module.automatic_optimization
            tensor = engine.before_backward(tensor)
        return super(FSDPPrecision, self).pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward outside autocast.

        Manual optimization calls this inside ``training_step``, where autocast is on.
        """
        run, engine = self._run, self._run.engine
        if engine is not None and engine.runs_backward:
            engine.backward(tensor, *args, **kwargs)
        elif run.autocast_dtype is None or (engine is not None and not engine.manual):
            super().backward(tensor, model, optimizer, *args, **kwargs)
        else:
            with torch.autocast(run.device.type, enabled=False):
                super().backward(tensor, model, optimizer, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Run Lightning's hooks after backward, and return the detached loss.

        Under manual optimization gradients are unscaled first, because users read them.

        Raises:
            PlanError: the loss was scaled, and no optimizer of the run updates the module.
        """
        engine = self._run.engine
        if engine is not None:
            engine.after_backward()
        with NOTHING if engine is None else engine.hook_watch:
            return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, check, clip, then step the optimizer or skip the step.

        ``docs/architecture.md`` explains it ("the life of one step"). An optimizer that evaluates
        its closure again steps as under stock Lightning, unchecked. If ``training_step`` returned
        ``None``, the optimizer does not step.

        Returns:
            The value of the optimizer's ``step``. If that is ``None``, the value of the closure.

        Raises:
            NonFiniteError: more skipped steps in a row than ``nonfinite`` allows. It is a
                LossScaleError after an overflow at the lowest loss scale, with ``at_min="raise"``.
                If ``nonfinite`` saves batches or rewinds, the end of the batch raises or rewinds.
            PlanError: an optimizer that came during the run cannot step under the policy, or its
                gradients come from a loss that was not scaled.
            RuntimeError: there is no run, because the fit is over.
        """
        run, engine = self._run, self._run.engine
        if engine is None:
            raise RuntimeError("An optimizer step outside of a run, after fit. Call trainer.fit(...) again.")
        engine.follow_optimizers()
        if run.checks_again is None:
            run.begin_steps(model)
        if optimizer in engine.unchecked:
            engine.scaler.note_unchecked()
            run.stepped = True
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        # If training_step returned None, the step is neither applied nor skipped.
        run.stepped = engine.pending or engine.manual
        if run.stepped:
            engine.unscale(optimizer)
            with engine.hook_watch:
                self._after_closure(model, optimizer)
            if run.checks_again:
                engine.check_finite_again(optimizer)
            if any(optimizer is each for each in engine.with_closure):
                another_pass = partial(self._run_again, optimizer, model, closure)
                kwargs["closure"] = EvaluatedClosure(result, optimizer, another_pass)
            returned = engine.step(optimizer, **kwargs)
            result = result if returned is None else returned
            engine.finish_step(None if engine.manual else partial(diagnosis.run_again, optimizer, model, closure))
        return result

    def _run_again(
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], first_pass_unused: bool
    ) -> Any:
        """Run the closure and clip within the optimizer's step, as stock Lightning does.

        Return the closure's value. If ``first_pass_unused`` is True, the optimizer did not need the
        pass before its step. Its later steps then run as under stock Lightning, unchecked.

        Raises:
            PlanError: there is a loss scale, or weights are sharded.
        """
        engine = self._run.engine
        assert engine is not None
        engine.accept_another_pass(optimizer)
        if first_pass_unused:
            engine.unchecked.append(optimizer)
        result = closure()
        self._after_closure(model, optimizer)
        return result

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the global norm, computed in fp32. Without a run nothing happens."""
        if (engine := self._run.engine) is not None:
            engine.clip_norm(optimizer, float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip every entry of the unscaled gradients. Without a run nothing happens."""
        if (engine := self._run.engine) is not None:
            engine.clip_value(optimizer, float(clip_val))

    # ------------------------------------------------------------------ checkpoints and the end

    def teardown(self) -> None:
        """Restore the process-wide settings and the methods that the run changed.

        Lightning calls this after success and after failure. If the Trainer ran inside the run of
        another one, the outer run becomes the plan's run again.

        Raises:
            NonFiniteError: a fit skipped all of its steps. Nothing is restored then: Lightning
                calls this once more. A short fit with a loss scale gets a warning instead.
        """
        ended(self._run)
        self._run.release()
        for run in self._runs.values():
            if run.engine is not None:  # an outer Trainer's run; the innermost is last
                self._run, self._last[:] = run, [run]


torch.serialization.add_safe_globals([MixedPrecisionPlan])
