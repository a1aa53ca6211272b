"""DeepSpeed's ZeRO stages under a plan: DeepSpeed shards and updates, the plan says what runs in its engine."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.checkpoints.folders import loads_alike, resumable
from lightning_mp.checkpoints.formats import without_file_protocol
from lightning_mp.compat import require_versions
from lightning_mp.compat.deepspeed import (
    HalfGroups,
    cast_partition,
    gather_as,
    halve_masters,
    initialize,
    partitions,
    reduce_as_stored,
    restore_linear,
)
from lightning_mp.compat.lightning import (
    DeepSpeedStrategy,
    ForwardRedirection,
    LightningModule,
    Trainer,
    TrainerFn,
    accumulates,
    begins_window,
    is_overridden,
    rank_zero_info,
    remove_module_hooks,
    reset_seed,
)
from lightning_mp.compat.torch import INNER_SCHEDULERS, load_own_tensors
from lightning_mp.deepspeed import merge
from lightning_mp.deepspeed.engine import ZeroEngine, refuse
from lightning_mp.deepspeed.read import load_json
from lightning_mp.errors import Faults, MissingExtraError, PlanError
from lightning_mp.modules import half_weights
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import HALF, to_torch
from lightning_mp.plan.engine import StepEngine
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.strategies.base import PlanStrategy, plan_of, refuse_callbacks, refuse_weights, set_learning_rates

Json = Mapping[str, Any] | str | PathLike[str]


class InsideEngine(ForwardRedirection):
    """Runs a step in the plan's context *inside* DeepSpeed's forward, which turns autocast off around its module."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def __call__(self, wrapper_module: Any, original_module: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method as the forward of ``wrapper_module``; the module's own forward is back before it runs."""
        own = original_module.__dict__.get("forward")  # a user's, put onto the instance

        def bring_back() -> None:
            original_module.__dict__.pop("forward", None)
            if own is not None:
                original_module.forward = own

        def step(*inner: Any, **named: Any) -> Any:
            bring_back()
            with self._plan.forward_context():
                return getattr(original_module, method_name)(*inner, **named)

        original_module.forward = step
        try:
            with torch.autocast(original_module.device.type, enabled=False):
                return wrapper_module(*args, **kwargs)
        finally:
            bring_back()


class PlanDeepSpeedStrategy(PlanStrategy, DeepSpeedStrategy):
    """ZeRO stage 1, 2 or 3 under a plan, on CUDA, and on the CPU with gloo.

    Args:
        stage: what is partitioned: 1 optimizer state, 2 and gradients, 3 and parameters.
        offload_optimizer: keep optimizer state on the CPU.
        offload_parameters: keep parameters on the CPU (stage 3).
        half_weights: while it trains, hold weights of matrix products in the compute dtype, beside fp32 masters in
            partitions (stage 1 and 2, mixed modes); who reads a weight between steps gets it rounded.
        config: a DeepSpeed JSON (a mapping or a path) to merge; what contradicts plan or Trainer is refused.
        policy: what the JSON is checked against at once; else it is checked when the run starts.
        host: further keywords of Lightning's ``DeepSpeedStrategy``.

    Raises:
        PlanError: a misspelt key, or a contradiction between JSON, plan and Trainer, with both values.
        MissingExtraError: DeepSpeed is not installed.
    """

    plan_engine = ZeroEngine
    own_format = "deepspeed"
    #: by param group in the engine, the user's that it was split off
    _came_from: Sequence[int] = ()
    #: while it trains, the weights that stage 1 or 2 holds in half precision
    _halves: HalfGroups | None = None

    def __init__(
        self,
        *,
        stage: int,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        half_weights: bool = False,
        config: Json | None = None,
        policy: PrecisionPolicy | None = None,
        **host: Any,
    ) -> None:
        try:
            import_module("deepspeed")
        except ImportError as error:
            raise MissingExtraError("deepspeed", "deepspeed", "a ZeRO strategy") from error
        require_versions("strategy", "deepspeed")
        if config is None:
            config = os.environ.get(self.DEEPSPEED_ENV_VAR)  # Lightning's own place for it
        self._zero = {"stage": stage, "offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
        super().__init__(**cast("Any", self._zero), **host)
        self._host_defaults = self.config
        self._given = None if config is None else load_json(config)
        self._stage, self.half_weights = stage, half_weights
        if half_weights and (stage == 3 or offload_optimizer):
            given = "stage=3, which gathers them so already" if stage == 3 else "offload_optimizer=True"
            raise PlanError.of(f"half_weights=True with {given}", "remove one", "strategy")
        if policy is not None and policy.precision != "auto":
            self.config = self._composed(policy)

    def _composed(self, policy: PrecisionPolicy) -> dict[str, Any]:
        """The JSON for ``policy``: the user's merged with the plan's, over Lightning's defaults."""
        from deepspeed.accelerator import get_accelerator

        supported = bool(cast("Any", get_accelerator()).is_fp16_supported())
        composed = merge.compose(policy, self._given, **cast("Any", self._zero), fp16_supported=supported)
        return merge.over(self._host_defaults, composed)

    def _load_config(self, config: Json | None) -> None:
        """Nothing: the JSON is merged with the plan's, and Lightning's defaults stand below both."""

    def completed(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """``policy`` with the loss scale of the JSON, where the plan has the default one."""
        return merge.completed(policy, self._given)

    # ------------------------------------------------------------------ processes

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()  # past its refusal of anything but CUDA

    def setup_distributed(self) -> None:
        if self.root_device.type == "cuda":
            super().setup_distributed()
        else:
            reset_seed()
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    @property
    def handles_gradient_accumulation(self) -> bool:
        """Lightning accumulates, as under any strategy; DeepSpeed is told which backward pass is the last."""
        return False

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        yield

    @property
    def _engine(self) -> ZeroEngine:
        return cast("ZeroEngine", plan_of(self).engine)

    # ------------------------------------------------------------------ the model

    def check_plan(self, engine: StepEngine, module: nn.Module, faults: Faults) -> dict[str, Any] | None:
        """The JSON for the run at hand; notes what ZeRO cannot do, and changes nothing."""
        lightning_module = cast("LightningModule", module)
        trainer = lightning_module.trainer
        self.check_remote_folders(faults)
        by_norm = trainer.gradient_clip_algorithm != "value"
        if not by_norm and trainer.gradient_clip_val:
            faults.add("gradient_clip_algorithm='value' with ZeRO", fix="clip by norm, or use strategy='mp_fsdp2'")
        if is_overridden("backward", lightning_module, LightningModule):
            faults.add(
                "LightningModule.backward overridden with ZeRO",
                fix="move it to on_before_backward / on_after_backward, or use strategy='mp_fsdp2'",
            )
        _check_storage(engine.policy, engine.pin_map, self._zero, faults)
        if self.half_weights and not engine.policy.mixed:
            faults.add(
                f"half_weights=True with precision={engine.policy.precision!r}, whose weights are "
                f"{engine.policy.storage_dtype} for products too",
                fix="use 'bf16-mixed' or '16-mixed', or remove half_weights",
            )
        refuse_callbacks(module, "ZeRO, whose weights and schedule are DeepSpeed's", faults)
        refuse_weights(module, faults, why="ZeRO", whole=self._stage < 3)
        try:
            composed = self._composed(engine.policy)
        except PlanError as error:
            faults.extend(error.faults)
            composed = self._given or {}
        try:
            return merge.add_trainer(
                composed,
                clip_norm=trainer.gradient_clip_val if by_norm else None,
                accumulate=trainer.accumulate_grad_batches,
                world_size=self.world_size,
            )
        except PlanError as error:
            faults.extend(fault for fault in error.faults if fault not in faults.found)
        return None

    def setup(self, trainer: Trainer) -> None:
        """Apply the plan, then hand the module and its optimizer to DeepSpeed."""
        assert self.accelerator is not None
        plan, module = plan_of(self), self._user_module
        self._forward_redirection = InsideEngine(plan)
        self.accelerator.setup(trainer)
        self.config, self._config_initialized = plan.apply(module), True
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        if trainer.training:
            self._initialize_deepspeed_train(module)
        else:
            self._initialize_deepspeed_inference(module)
        self.setup_precision_plugin()
        self.barrier()

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        names = self._half_names(model) if self.half_weights else {}
        if optimizer is not None:
            with Faults("strategy") as faults:
                self._engine.check_optimizers([optimizer], faults)
                given: Any = (self.config or {}).get("scheduler")
                if lr_scheduler is not None and given is not None:
                    both = f"scheduler={given!r} in the JSON and {type(lr_scheduler).__name__} in configure_optimizers"
                    faults.add(both, fix="remove one")
            self._came_from = self._engine.source_group = split_by_dtype(optimizer, lr_scheduler, names)
        for parameter in model.parameters():
            cast_partition(parameter)  # of those made partitioned, a pin has cast the empty shell
        trained = by_dtype((parameter for parameter in model.parameters() if parameter.requires_grad), names)
        groups = [{"params": members} for members in trained]
        engine, zero = self._engine_of(model, self.config, groups, optimizer, lr_scheduler)
        if self._stage < 3:
            halve_masters(zero, HALF)  # the policy's optimizer state is half precision too
        if names:
            self._halves = HalfGroups(zero, names, self._compute_dtype)
        return engine, zero

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """An engine without an optimizer; stage 3 gathers, the others have whole parameters."""
        assert isinstance(self.config, dict)
        config = {"train_micro_batch_size_per_gpu": 1, **{key: self.config[key] for key in ("fp16", "bf16")}}
        if self._stage == 3:
            config |= {key: self.config[key] for key in ("zero_allow_untested_optimizer", "zero_optimization")}
            remove_module_hooks(model)  # those of a training engine, which would gather a second time
        self.model, _ = self._engine_of(model, config, [], None, None)

    def _engine_of(self, model: nn.Module, config: Any, groups: Any, optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
        engine, zero = initialize(
            model,
            args=Namespace(device_rank=self.local_rank),  # as Lightning, but a CPU has no index
            config=config,
            model_parameters=groups,
            optimizer=optimizer,
            lr_scheduler=scheduler,
        )
        if self._stage == 3:
            # Gather in the compute dtype what autocast alone computes with; partitions stay as stored.
            names = self._half_names(model)
            gathered = {
                id(one): gather_as(one, self._compute_dtype if id(one) in names else None) for one in model.parameters()
            }
            self._engine.halves = {key: name for key, name in names.items() if gathered[key]}
            reduce_as_stored(zero)
        return engine, zero

    @property
    def _compute_dtype(self) -> torch.dtype:
        return to_torch(plan_of(self).policy.compute_dtype)

    def _half_names(self, model: nn.Module) -> dict[int, str]:
        """By ``id``, the names of fp32 weights that autocast alone computes with; of whole ones no vectors."""
        weights = half_weights.survey(model, self._engine.pin_map, plan_of(self).policy)
        fp32 = (one for one in weights if one.reason is None and one.tensor.dtype == torch.float32)
        return {id(one.tensor): one.name for one in fp32 if self._stage == 3 or one.tensor.dim() > 1}

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Modules made in it are partitioned at once under stage 3, in fp32."""
        if self._stage < 3:
            yield
            return
        import deepspeed

        policy = plan_of(self).policy
        if policy.precision == "auto":
            raise PlanError.of(
                "precision='auto' with configure_model() under ZeRO-3, which partitions weights as they are made",
                "write precision='bf16-mixed', or make the model in __init__",
                "strategy",
            )
        batch = ("train_batch_size", "gradient_accumulation_steps")  # the Trainer's; zero.Init only looks for any
        config = {key: value for key, value in self._composed(policy).items() if key not in batch}
        # What ZeRO-3 stores is fp32. zero.Init takes that from a config without half engines alone: of a dtype it is
        # given it makes bf16 on a device for which DeepSpeed has no fp16 (Init._set_dtype).
        config |= {"fp16": {"enabled": False}, "train_micro_batch_size_per_gpu": 1}
        with deepspeed.zero.Init(remote_device=self.remote_device, config_dict_or_path=config):
            yield

    def teardown(self) -> None:
        """Put back what DeepSpeed changed in the process; Lightning calls it after success and after failure."""
        restore_linear()
        self._release(gather=self.world_size == 1)  # after a failure nobody waits for another rank
        super().teardown()

    def _release(self, *, gather: bool = True) -> None:
        if self._halves is not None:
            self._halves.release(gather=gather)
            self._halves = None

    def _fp32_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self._halves is None else self._halves.fp32()

    # ------------------------------------------------------------------ the step

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward through DeepSpeed, told whether it is the last one before a step."""
        module = self._user_module
        automatic = module.automatic_optimization
        if automatic and begins_window(module.trainer, module.trainer.fit_loop.batch_idx):
            self._engine.begin_window()
        self.deepspeed_engine.set_gradient_accumulation_boundary(not (automatic and accumulates(module.trainer)))
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def on_train_end(self) -> None:
        """The last batch's hooks may have changed weights too."""
        self._engine.check_weights()
        self._release()
        self.share_buffers()

    on_validation_start = on_test_start = on_predict_start = PlanStrategy.share_buffers

    # ------------------------------------------------------------------ checkpoints

    @property
    def saves_folders(self) -> bool:
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save through DeepSpeed; schedulers as if no param group had been split.

        Raises:
            RuntimeError: under stage 3, after an evaluation outside of a fit.
        """
        if self.deepspeed_engine.checkpoint_engine is None:
            refuse(
                "trainer.save_checkpoint() after trainer.validate() or test() with ZeRO-3, whose engine then has no "
                "optimizer to save",
                "save before it, or by ModelCheckpoint in the fit",
            )
        source_group = self._came_from
        first = [source_group.index(group) for group in range(len(set(source_group)))]
        for state in checkpoint.get("lr_schedulers", ()) if len(first) < len(source_group) else ():
            regroup(state, len(source_group), first)
        with self._fp32_weights():
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder that as many ranks of the same stage wrote with everything, all else without optimizer state.

        Raises:
            CheckpointFormatError: no checkpoint.
        """
        path = without_file_protocol(self.broadcast(checkpoint_path))
        with self._optimizers_while_fitting(), self._fp32_weights():
            checkpoint = super().load_checkpoint(path, weights_only=weights_only)
            self._engine.override_zero_settings()
            source_group = self._came_from
            before = len(set(source_group))
            for state in checkpoint.get("lr_schedulers", ()) if before < len(source_group) else ():
                regroup(state, before, source_group)
            if not self.reads(path):
                set_learning_rates(self.optimizers, checkpoint)
        return checkpoint

    def reads(self, path: Any) -> bool:
        if self._stage == 3 and self._user_module.trainer.state.fn != TrainerFn.FITTING:
            return False  # an engine without an optimizer takes whole weights only
        alike = super().reads(path) and resumable(Path(path), self._stage, self.world_size)
        names = {id(parameter): name for name, parameter in self._user_module.named_parameters()}
        flat = [group for zero in self.optimizers if self._stage < 3 for group, _ in partitions(zero)]
        groups = [[names[id(one)] for one in group] for group in flat]
        return alike and (not groups or loads_alike(Path(path), groups))

    def load_full(self, checkpoint: dict[str, Any]) -> None:
        """Load whole weights into the partitions."""
        module = self._user_module
        if checkpoint.pop("optimizer_states", None):
            rank_zero_info("Optimizer state of another strategy does not fit ZeRO's partitions: it starts at zero.")
        state = checkpoint["state_dict"]
        if self._stage < 3:
            module.load_state_dict(state, strict=module.strict_loading)
        else:
            load_full_state(module, state, strict=module.strict_loading)
        for zero in self.optimizers:
            cast("Any", zero).refresh_fp32_params()


def _check_storage(policy: PrecisionPolicy, pin_map: PinMap, zero: Mapping[str, int], faults: Faults) -> None:
    """Half-precision weights that are trained: only ZeRO-1/2 can be made to keep no fp32 copy of them."""
    if zero["stage"] < 3 and not zero["offload_optimizer"] and not zero["offload_parameters"]:
        return
    trained = (one for one in pin_map.members if any(p.requires_grad for p in one.module.parameters(recurse=False)))
    halves = [
        f"pin {pin.pattern!r} to {pin.dtype}"
        for pin in dict.fromkeys(one.pin for one in trained)
        if pin.dtype != "fp32"
    ]
    why = "ZeRO-3" if zero["stage"] == 3 else "ZeRO's optimizer offload"
    for given in halves if policy.storage_dtype == "fp32" else [f"precision={policy.precision!r}"]:
        faults.add(
            f"{given} with {why}, which keeps fp32 weights and optimizer state of what is trained",
            fix=f"use {policy.precision.replace('true', 'mixed')!r} without such pins, or strategy='mp_fsdp2' or "
            "'mp_deepspeed_zero2'",
        )


def load_full_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """``module.load_state_dict(state)``, one submodule gathered at a time; every rank has all of ``state``.

    Lightning's own way loads buffers on rank 0 alone, and says nothing of names that are missing or do not fit.

    Raises:
        RuntimeError: names are missing or unexpected and ``strict``, or shapes differ.
    """
    import deepspeed

    missing, unexpected, errors = list[str](), list[str](), list[str]()
    left = dict(state)  # hooks of modules rename in it what an earlier version of them has saved
    for name, part in module.named_modules():
        with deepspeed.zero.GatheredParameters(list(part.parameters(recurse=False)), modifier_rank=0):
            found = load_own_tensors(part, left, f"{name}." if name else "")
        for names, more in zip((missing, unexpected, errors), found, strict=True):
            names.extend(more)
    if strict and (missing or unexpected):
        errors.append(f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}")
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: " + "\n\t".join(errors))


# ------------------------------------------------------------------ param groups of one dtype each

#: how the names end of a scheduler's lists that hold an entry a group (torch's own, and what others call theirs)
_PER_GROUP = ("lr", "lrs", "lambdas", "momentums")


def by_dtype(parameters: Iterable[Tensor], halves: Container[int] = ()) -> list[list[Tensor]]:
    """Trained parameters in lists of one dtype, fp32 first; frozen ones, which are not flattened, end the first list.

    DeepSpeed takes the first parameter's dtype for that of the engine. ``halves``, by ``id``, have lists of their own.
    """
    everything = list(parameters)
    trained, frozen = ([one for one in everything if one.requires_grad == wanted] for wanted in (True, False))
    kinds = [(one.dtype != torch.float32, str(one.dtype), id(one) in halves) for one in trained]
    lists = [[one for one, own in zip(trained, kinds, strict=True) if own == kind] for kind in sorted({*kinds})] or [[]]
    lists[0] += frozen
    return lists


def split_by_dtype(optimizer: Optimizer, scheduler: Any, halves: Container[int] = ()) -> list[int]:
    """Split groups that hold several dtypes, in place; for each new group, the index of the one it came from.

    A group whose trained parameters are fp32 comes first, one with none to train last. A scheduler's lists of one entry
    a group follow.
    """
    old = optimizer.param_groups
    pieces = [(index, members) for index, group in enumerate(old) for members in by_dtype(group["params"], halves)]
    pieces.sort(key=lambda piece: _rank(piece[1], halves))  # stable
    source_group = [index for index, _ in pieces]
    groups = [dict(old[at]) if at in source_group[:place] else old[at] for place, at in enumerate(source_group)]
    for group, (_, members) in zip(groups, pieces, strict=True):
        group["params"] = members
    if scheduler is not None:
        regroup(vars(scheduler), len(old), source_group)
    optimizer.param_groups[:] = groups
    return source_group


def _rank(members: Sequence[Tensor], halves: Container[int]) -> int:
    if not members or not members[0].requires_grad:
        return 2
    return int(members[0].dtype != torch.float32 or id(members[0]) in halves)


def regroup(state: dict[str, Any], size: int, source_group: Sequence[int]) -> None:
    """Reorder a scheduler's lists of ``size`` entries, one a group: group ``i`` gets that of ``source_group[i]``.

    Milestones and phases may be as many as there are groups by chance: only lists named for what a group has follow.
    """
    for key, value in state.items():
        entries = cast("list[Any]", value) if isinstance(value, list) else None
        if entries is None:
            continue
        if key == INNER_SCHEDULERS:
            for inner in entries:
                regroup(cast("dict[str, Any]", inner) if isinstance(inner, dict) else vars(inner), size, source_group)
        elif len(entries) == size and key.endswith(_PER_GROUP):
            state[key] = [entries[index] for index in source_group]
