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
    """Carries a precision policy out as a Lightning plugin: ``Trainer(plugins=[MixedPrecisionPlan("16-mixed")])``.

    It is a ``FSDPPrecision`` only so that every stock strategy accepts it; nothing of that class is used.

    Args:
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"``, ``"bf16-true"``, ``"16-true"``, ``"fp8-mixed"`` or
            ``"auto"``; other words for them are taken as well (``16``, ``"fp16"``, ``"bf16"``).
        loss_scaling: the rule of the loss scale, for the fp16 modes; a :class:`LossScaling` or a mapping of its fields.
        pins: module patterns and the dtype each is stored and run in, ``{"*norm*": "fp32"}``; the first match wins.
        tf32: ``True`` (``"high"``) lets fp32 products run in TF32, ``False`` (``"highest"``) not; ``None`` is torch's.
        checkpointing: the modules that recompute their activations; a pattern or a :class:`Checkpointing`.
        fp8: the rule of the FP8 products, for ``"fp8-mixed"``; a recipe's name or an :class:`FP8`.
        nonfinite: ``"skip"``, ``"raise"``, ``"ignore"`` or a :class:`NonFinite`: what a non-finite gradient leads to.
        reduce_dtype: the dtype gradients are summed in across ranks, fp32 by default.
        buffer_dtype: the dtype of floating buffers; by default that of the parameters under the true modes.

    Raises:
        PlanError: what was given cannot be carried out; every fault is named at once.
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

    #: keys of a saved plan that are no fields of a policy: it can be read, and does not run
    _unknown_keys: Sequence[str] = ()

    def _declare(self, policy: PrecisionPolicy) -> None:
        self._declared, self._run = policy, Run(policy)
        #: the runs of Trainers that live; the last one, which copies of the plan share
        self._runs, self._last = WeakKeyDictionary[Trainer, Run](), list[Run]()

    @classmethod
    def from_policy(cls, policy: PrecisionPolicy) -> MixedPrecisionPlan:
        """The plan that carries ``policy`` out."""
        plan = cls.__new__(cls)
        plan._declare(policy)
        return plan

    @classmethod
    def preset(cls, name: str) -> MixedPrecisionPlan:
        """A plan by name: fp32, tf32, bf16, fp16, bf16_true, fp16_true, longspec, or v100, t4, a100, h100, b200."""
        return cls.from_policy(precision_policy.preset(name))

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | int | PathLike[str]) -> MixedPrecisionPlan:
        """A plan from a mapping of its arguments, an OmegaConf ``DictConfig``, the path of a YAML file, or a precision.

        Raises:
            PlanError: an unknown key or a bad value; every fault is named at once, with the line of a file.
        """
        with load.named_lines(config):
            return cls.from_policy(PrecisionPolicy.from_dict(load.plain_mapping(config)))

    def __getstate__(self) -> dict[str, Any]:
        # plain values, which torch.load(weights_only=True) takes
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
        # Packages copy their arguments: what the copy counts can be asked of the plan that the user holds.
        copied._last = self._last
        return copied

    @property
    def device(self) -> str:
        """The type of the device that it computes on, ``"cuda"``, as Lightning's ``MixedPrecision`` has it."""
        return self._run.device.type

    def __repr__(self) -> str:
        precision, *others = self._declared.arguments().items()
        return call(type(self).__name__, dict(others), precision[1])

    # ------------------------------------------------------------------ the module

    def convert_module(self, module: nn.Module) -> nn.Module:
        """:meth:`apply`, as Lightning's own strategies call it; returns ``module``."""
        self.apply(module)
        return module

    def apply(self, module: nn.Module) -> Any:
        """Check everything, then change ``module`` in place to what the policy declares.

        Returns what the strategy's ``check_plan`` did, such as the units that it is going to shard, if it has one.

        Raises:
            PlanError: the policy cannot be carried out on this model, device or strategy; nothing was changed.
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
            from lightning_mp.preflight.fit_checks import warn_at_fit  # here: much to load for a plan that runs no fit

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
        """What the engine has to know of the Trainer; in a fit the callback for bad steps, where the policy asks."""
        engine.stages = trainer.state, RunningStage.TRAINING
        if trainer.state.fn != TrainerFn.FITTING:
            return None
        engine.synced = for_strategy.synced(trainer.strategy, module, faults)
        if not self.policy.nonfinite.watches:
            return None
        from lightning_mp.bad_steps.handler import BadStepCallback  # here: much to load

        return BadStepCallback(self, trainer, faults)

    def _attach(self, trainer: Trainer | None, module: nn.Module) -> None:
        """Begin the run of ``trainer``, or go on with it; that of a Trainer around it waits until it ends."""
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
        """Take the optimizers, and check them against the policy.

        Raises:
            PlanError: an optimizer that evaluates its closure again, under loss scaling.
        """
        if self.engine is not None:
            trainer = self.trainer
            # A Trainer that tests after a fit hands over the optimizers of that fit, which do not step.
            stepping = trainer is None or trainer.state.fn == TrainerFn.FITTING
            self.engine.connect(model, optimizers if stepping else [])
        return model, optimizers, lr_schedulers

    # ------------------------------------------------------------------ forward

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Tensors and modules made in it take the parameters' dtype under the true modes."""
        run = self._run
        return default_dtype(run.storage_dtype) if run.half_storage else nullcontext()

    module_init_context = tensor_init_context

    def forward_context(self) -> Any:
        """Autocast under the mixed modes, the parameters' dtype as the default one under the true modes."""
        run = self._run
        if run.autocast_dtype is None:
            return self.tensor_init_context()
        # As in stock Lightning, without the weight cache: it keeps stale weights and blocks graph capture.
        return torch.autocast(run.device.type, run.autocast_dtype, cache_enabled=False)

    def train_step_context(self) -> Any:
        """The forward context; in the first step, what runs past its pin is refused."""
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
        """The forward context; watched as in training where the sanity check comes first."""
        with self.forward_context(), NOTHING if self.engine is None else self.engine.first_step("validation_step"):
            yield

    def convert_input(self, data: Any) -> Any:
        """Floating inputs in the parameters' dtype under the true modes; untouched otherwise."""
        return cast_floating(data, self._run.storage_dtype) if self._run.half_storage else data

    def convert_output(self, data: Any) -> Any:
        """Floating outputs in torch's default dtype under the true modes; untouched otherwise."""
        return cast_floating(data, torch.get_default_dtype()) if self._run.half_storage else data

    # ------------------------------------------------------------------ backward and step

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Scale the loss; a ``PlanError`` under Lightning Fabric, which has no Trainer."""
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
        """Run backward, outside autocast: manual optimization calls it from within ``training_step``."""
        run, engine = self._run, self._run.engine
        if engine is not None and engine.runs_backward:
            engine.backward(tensor, *args, **kwargs)
        elif run.autocast_dtype is None or (engine is not None and not engine.manual):
            super().backward(tensor, model, optimizer, *args, **kwargs)
        else:
            with torch.autocast(run.device.type, enabled=False):
                super().backward(tensor, model, optimizer, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Under manual optimization, unscale gradients before users see them."""
        engine = self._run.engine
        if engine is not None:
            engine.after_backward()
        with NOTHING if engine is None else engine.hook_watch:
            return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, check, clip, then step or skip (``docs/architecture.md``, "the life of one step").

        Raises:
            NonFiniteError: more non-finite steps in a row than ``nonfinite`` allows.
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
        run.stepped = engine.pending or engine.manual  # else training_step returned None: neither applied nor skipped
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
        """Run the closure within the optimizer's step, as stock Lightning does, and return its loss.

        With ``first_pass_unused`` the optimizer's later steps are those of stock Lightning.

        Raises:
            PlanError: a loss scale or shards do not allow it.
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
        """Clip by the global norm, taken in fp32."""
        if (engine := self._run.engine) is not None:
            engine.clip_norm(optimizer, float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip every entry of the unscaled gradients."""
        if (engine := self._run.engine) is not None:
            engine.clip_value(optimizer, float(clip_val))

    # ------------------------------------------------------------------ checkpoints and the end

    def teardown(self) -> None:
        """Restore every process-global that was set; Lightning calls this after success and after failure.

        Raises:
            NonFiniteError: a fit applied none of its steps; Lightning then calls this once more.
        """
        ended(self._run)
        self._run.release()
        for run in self._runs.values():
            if run.engine is not None:  # that of a Trainer around this one, the innermost is the last
                self._run, self._last[:] = run, [run]


torch.serialization.add_safe_globals([MixedPrecisionPlan])
