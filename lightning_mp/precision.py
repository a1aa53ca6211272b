"""``MixedPrecisionPlan``: the Lightning precision plugin that binds a policy to an engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.compat import require_versions
from lightning_mp.compat.lightning import (
    DeepSpeedStrategy,
    FSDPPrecision,
    LightningModule,
    RunningStage,
    Strategy,
    Trainer,
    TrainerFn,
    TrainerStatus,
    check_copy,
    meet_other_copy,
    rank_zero_warn,
    trainer_of,
)
from lightning_mp.compat.torch import backward_traced_outside_autocast
from lightning_mp.deepspeed_config.merge import DeepSpeedJson, DeepSpeedNotes
from lightning_mp.engines import alike, diagnosis, for_strategy, optimizer_facts, plan_base
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.plan_base import PlanBase
from lightning_mp.engines.skip_aware import SkipAwareHooks, may_change_gradients
from lightning_mp.errors import Faults, PlanError, near_keywords
from lightning_mp.modules.patterns import call_with_original_classes
from lightning_mp.numerics.dtypes import cast_floating, default_dtype, describe, to_torch
from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.policy import PrecisionPolicy, hardware, load, presets
from lightning_mp.policy.pieces import call
from lightning_mp.policy.precision_policy import (
    CheckpointingLike,
    FP8Like,
    LossScalingLike,
    NonFiniteLike,
    PinsLike,
    Precision,
)

if TYPE_CHECKING:
    from lightning_mp.monitor.nonfinite.bad_steps import PlanRun

_NOTHING = nullcontext()
#: what stays when another Trainer takes the plan; all other attributes belong to one Trainer's run
_OF_ALL_RUNS = ("_declared", "_others", "_around", "_original", "_latest", "_ran")


def unpickled(
    declared: dict[str, Any], policy: dict[str, Any], state: dict[str, Any], notes: dict[str, Any] | None = None
) -> MixedPrecisionPlan:
    """A plan that was pickled, of plain values, so that torch's ``weights_only=True`` takes it."""
    plan: Any = MixedPrecisionPlan.from_policy(PrecisionPolicy.from_dict(declared))
    plan.policy, plan._ran = PrecisionPolicy.from_dict(policy), True
    plan._start_over()
    plan.load_state_dict(state)
    if notes is not None:
        plan.deepspeed_notes = DeepSpeedNotes(**notes)
    return plan


torch.serialization.add_safe_globals([unpickled])


class MixedPrecisionPlan(DeepSpeedJson, PlanBase, FSDPPrecision):
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
        meet_other_copy(MixedPrecisionPlan, "FSDPPrecision")
        dtypes: dict[str, Any] = {"precision": precision, "tf32": tf32, "reduce_dtype": reduce_dtype or "fp32"}
        steps: dict[str, Any] = {"loss_scaling": loss_scaling, "nonfinite": nonfinite, "buffer_dtype": buffer_dtype}
        modules: dict[str, Any] = {"pins": pins, "checkpointing": checkpointing, "fp8": fp8}
        self._declare(PrecisionPolicy(**dtypes, **steps, **modules))

    def _declare(self, policy: PrecisionPolicy) -> None:
        self.policy = self._declared = policy
        self._device = torch.device("cpu")
        #: whether the last call of optimizer_step made a step; it does not where training_step returned None
        self._stepped = False
        #: keeps schedulers from moving on a skipped step; installed in the first step
        self._hooks: SkipAwareHooks | None = None
        self._checks_again = False
        self._run: PlanRun | None = None
        #: restores the process-global switches and the methods that a run changes
        self._undo = ExitStack()
        #: the attributes of other Trainers' runs, and the Trainers whose running fit started this run, outermost first
        self._others: WeakKeyDictionary[Trainer, dict[str, Any]] = WeakKeyDictionary()
        self._around: list[Trainer] = []
        self._start_over()

    @classmethod
    def from_policy(cls, policy: PrecisionPolicy) -> MixedPrecisionPlan:
        """The plan that carries ``policy`` out."""
        plan = cls.__new__(cls)
        plan._declare(policy)
        return plan

    @classmethod
    def preset(cls, name: str) -> MixedPrecisionPlan:
        """A plan by name: fp32, tf32, bf16, fp16, bf16_true, fp16_true, longspec, or v100, t4, a100, h100, b200."""
        return cls.from_policy(presets.preset(name))

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | int | PathLike[str]) -> MixedPrecisionPlan:
        """A plan from a mapping of its arguments, an OmegaConf ``DictConfig``, the path of a YAML file, or a precision.

        Raises:
            PlanError: an unknown key or a bad value; every fault is named at once, with the line of a file.
        """
        with load.named_lines(config):
            return cls.from_policy(PrecisionPolicy.from_dict(load.plain_mapping(config)))

    def _start_over(self) -> None:
        self.precision = cast("Any", self.policy.precision)
        rule = self.policy.loss_scaling if self.policy.precision != "auto" else None
        self.loss_scaler = LossScaler(rule, on_step=self._on_users_step)
        self.scaler = cast("Any", self.loss_scaler if self.loss_scaler.enabled else None)
        self._desired_input_dtype = to_torch(self.policy.storage_dtype)
        self._autocast_dtype = to_torch(self.policy.compute_dtype) if self.policy.mixed else None
        self._half_storage = self._desired_input_dtype != torch.float32

    def _on_users_step(self) -> None:
        if self.engine is not None:
            self.engine.check_budget(None)

    def _global_step(self) -> int:
        trainer = self.trainer
        return self.loss_scaler.attempts if trainer is None else trainer.global_step

    def __getstate__(self) -> dict[str, Any]:
        # A copy belongs to no run: it has no Trainer, no engine, and nothing to restore.
        detached = dict.fromkeys(("_trainer", "engine", "_fp8", "_run", "_hooks", "_original", "_latest"))
        others = {"_others": WeakKeyDictionary[Any, Any](), "_around": []}
        return {**self.__dict__, **detached, **others, "_undo": ExitStack()}

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedPrecisionPlan:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(deepcopy(self.__getstate__(), memo))
        copied._original = weakref.ref(self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is not MixedPrecisionPlan:
            return super().__reduce_ex__(protocol)
        notes = None if self.deepspeed_notes is None else asdict(self.deepspeed_notes)
        return unpickled, (self._declared.to_dict(), self.policy.to_dict(), self.state_dict(), notes)

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

        Returns what the strategy's ``check_plan`` returned, such as the units that it is going to shard; ``None`` where
        the strategy has none.

        Raises:
            PlanError: the policy cannot be carried out on this model, device or strategy; nothing was changed.
        """
        check_copy(module, type(self).__name__)
        trainer = trainer_of(module)
        strategy = None if trainer is None else trainer.strategy
        zero = ["deepspeed"] if isinstance(strategy, DeepSpeedStrategy) else []
        require_versions("MixedPrecisionPlan", "torch", "lightning", *zero)
        self._attach(trainer, module)
        faults, device = Faults(), describe(self._device)
        self._resolve(device, module, strategy)
        if self._around and self._around[-1].strategy.lightning_module is module and not for_strategy.shards(strategy):
            return None  # prepared already, by the run around this one
        for_strategy.check_device(self.policy, device, faults)
        engine = for_strategy.engine_of(strategy)(
            self.policy,
            device=self._device,
            scaler=self.loss_scaler,
            distributed=for_strategy.is_distributed(strategy),
            global_step=self._global_step,
        )
        engine.check(module, faults)
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        run = layout = None
        if trainer is not None and strategy is not None:
            if engine.fp8 is not None:
                engine.fp8.stages = trainer.state, RunningStage.TRAINING
            if fitting:
                engine.synced = for_strategy.synced(strategy, module, faults)
                # here: much to load for a plan that runs no fit
                from lightning_mp.monitor.nonfinite.bad_steps import PlanRun

                run = PlanRun(self, trainer, faults)
            layout = for_strategy.check(strategy, engine, module, faults)
        if engine.distributed:
            auto_on = device.name if self._declared.precision == "auto" else ""
            alike.compare(repr(self.from_policy(self.policy)), auto_on, module, self._device, faults)
        faults.raise_if_any()
        self._begin(engine, module, run, device)
        return layout

    def _begin(self, engine: StepEngine, module: nn.Module, run: PlanRun | None, device: hardware.Device) -> None:
        for pattern in engine.pin_map.shadowed:
            rank_zero_warn(f"pin {pattern!r} has no effect: the pins before it cover everything it matches")
        self._run = run  # before it begins: a logger that fails then is no reason to leave its callback behind
        if run is not None:
            run.begin(module, engine)
        self.engine, self._fp8 = engine, engine.fp8
        engine.prepare(module)
        restore_tf32 = for_strategy.switch_tf32(self.policy, device)
        if restore_tf32 is not None:
            self._undo.callback(restore_tf32)
        if self.policy.pins and trainer_of(module) is not None:
            # Else torch's encoder layers read their children's weights in evaluation, past the pins.
            self._undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
        if run is not None:
            self._undo.callback(call_with_original_classes(module, "configure_optimizers"))

    def _attach(self, trainer: Trainer | None, module: nn.Module) -> None:
        before = None if self._trainer is None else self._trainer()
        running = before is not None and before.state.status == TrainerStatus.RUNNING and self.engine is not None
        if before is not None and running and before is not trainer:
            self._around.append(before)  # until the teardown of this one
        else:
            self._release()
        if trainer is None:
            first = next(module.parameters(), None)
            self._device = torch.device("cpu") if first is None else first.device
            return
        if self._ran and before is not trainer:  # a new run, not the next stage of this one
            self._put_aside(before)
            if trainer in self._others:
                self.__dict__.update(self._others.pop(trainer))
            else:
                self.policy = self._declared
                self._start_over()
        self._device = trainer.strategy.root_device
        self._trainer, self._ran = weakref.ref(trainer), True
        original = None if self._original is None else self._original()
        if original is not None and not original._ran:
            original._latest = self  # its counts are asked for, which only a copy has

    def _put_aside(self, trainer: Trainer | None) -> None:
        """Keep the attributes of a Trainer's run while another Trainer has the plan."""
        if trainer is not None:
            self._others[trainer] = {name: one for name, one in vars(self).items() if name not in _OF_ALL_RUNS}
        self.engine, self._fp8, self._run = None, None, None
        self._hooks, self._undo = None, ExitStack()

    def _resolve(self, device: hardware.Device, module: nn.Module, strategy: Strategy | None) -> None:
        policy = self.policy
        if policy.precision == "auto":
            policy = for_strategy.resolved(policy, device, module)
        policy = for_strategy.completed(strategy, policy)
        if policy != self.policy:
            self.policy = policy
            self._start_over()

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Take the optimizers, and check them against the policy.

        Raises:
            PlanError: an optimizer that evaluates its closure again, under loss scaling.
        """
        if self.engine is not None:
            self.engine.connect(model, optimizers)
            for optimizer in optimizers:
                optimizer_facts.warn_of_eps(optimizer)
        return model, optimizers, lr_schedulers

    # ------------------------------------------------------------------ forward

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Tensors made in it take the parameters' dtype under the true modes."""
        return default_dtype(self._desired_input_dtype) if self._half_storage else nullcontext()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Modules made in it take the parameters' dtype under the true modes."""
        return self.tensor_init_context()

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Autocast under the mixed modes, the parameters' dtype as the default one under the true modes."""
        if self._autocast_dtype is None:
            context = self.tensor_init_context()
        else:
            # As in stock Lightning, without the weight cache: it keeps stale weights and blocks graph capture.
            context = torch.autocast(self._device.type, self._autocast_dtype, cache_enabled=False)
        with context, backward_traced_outside_autocast():
            yield

    @contextmanager
    def train_step_context(self) -> Generator[None, None, None]:
        """The forward context; in the first step a pinned weight that is read from outside its module is refused."""
        engine = self.engine
        with self.forward_context(), _NOTHING if engine is None else engine.training_step():
            yield
        if engine is not None and engine.scaler.enabled:
            engine.close_group()

    def convert_input(self, data: Any) -> Any:
        """Floating inputs in the parameters' dtype under the true modes; untouched otherwise."""
        return cast_floating(data, self._desired_input_dtype) if self._half_storage else data

    def convert_output(self, data: Any) -> Any:
        """Floating outputs in torch's default dtype under the true modes; untouched otherwise."""
        return cast_floating(data, torch.get_default_dtype()) if self._half_storage else data

    # ------------------------------------------------------------------ backward and step

    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Scale the loss; a ``PlanError`` under Lightning Fabric, which has no Trainer."""
        if self._trainer is None and trainer_of(module) is None:
            raise PlanError.of(
                "Fabric(plugins=[MixedPrecisionPlan(...)]), or a backward pass without a Trainer",
                "use a Trainer, or Fabric(precision=...) without the plan",
            )
        if self.engine is not None:
            self.engine.manual = not module.automatic_optimization
            tensor = self.engine.before_backward(tensor)
        return super(FSDPPrecision, self).pre_backward(tensor, module)

    def backward(self, tensor: Tensor, model: LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Run backward, outside autocast: manual optimization calls it from within ``training_step``."""
        engine = self.engine
        if engine is not None and engine.runs_backward:
            engine.backward(tensor, *args, **kwargs)
        elif self._autocast_dtype is None or (engine is not None and not engine.manual):
            super().backward(tensor, model, optimizer, *args, **kwargs)
        else:
            with torch.autocast(self._device.type, enabled=False):
                super().backward(tensor, model, optimizer, *args, **kwargs)

    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:
        """Under manual optimization, unscale gradients before users see them."""
        engine = self.engine
        if engine is not None:
            engine.after_backward()
        with _NOTHING if engine is None else engine.hook_watch:
            return super().post_backward(tensor, module)

    def optimizer_step(self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, unscale, check, clip, then step or skip (``docs/architecture.md``, "the life of one step").

        Raises:
            NonFiniteError: more non-finite steps in a row than ``nonfinite`` allows.
        """
        engine = self.engine
        if engine is None:
            raise RuntimeError("An optimizer step outside of a run, after fit. Call trainer.fit(...) again.")
        if self._hooks is None:
            self._hooks, self._checks_again = SkipAwareHooks(), may_change_gradients(model)
            self._hooks.install(model.trainer, model, lambda: self._stepped and self.step_skipped)
        self._stepped = False
        replay = None if engine.manual else partial(diagnosis.run_again, optimizer, model, closure)
        result = closure()
        if not engine.pending and not engine.manual:
            return result  # training_step returned None: neither applied nor skipped
        engine.unscale(optimizer)
        with engine.hook_watch:
            self._after_closure(model, optimizer)
        if self._checks_again:
            engine.check_finite_again(optimizer)
        if engine.gives_closure and optimizer_facts.takes_closure(type(optimizer)):
            again = partial(self._evaluate_again, engine, model, optimizer, closure)
            kwargs["closure"] = optimizer_facts.Evaluated(optimizer, result, again)
        returned = engine.step(optimizer, **kwargs)
        result = result if returned is None else returned
        self._stepped = True
        engine.finish_step(replay)
        return result

    def _evaluate_again(self, engine: StepEngine, model: LightningModule, optimizer: Any, closure: Any) -> Any:
        """Run the closure once more for the optimizer (LBFGS, SAM), as Lightning's own plugins do."""
        engine.evaluates_again(optimizer)
        return self._wrap_closure(model, optimizer, closure)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the global norm, taken in fp32."""
        if self.engine is not None:
            self.engine.clip_norm(optimizer, float(clip_val))

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip every entry of the unscaled gradients."""
        if self.engine is not None:
            self.engine.clip_value(optimizer, float(clip_val))

    # ------------------------------------------------------------------ checkpoints and the end

    def teardown(self) -> None:
        """Restore every process-global that was set; Lightning calls this after success and after failure."""
        plan_base.ended(self, self.trainer)
        self._release()
        if self._around:  # a run in a callback of another run, which goes on
            outer = self._around.pop()
            self._put_aside(self.trainer)
            self.__dict__.update(self._others.pop(outer))
            outer.lightning_module.trainer = outer

    def _release(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._run is not None:
            self._run.end()
            self._run = None
        if self.engine is not None:
            self.engine.release()
            self.engine = None
        self._undo.close()
