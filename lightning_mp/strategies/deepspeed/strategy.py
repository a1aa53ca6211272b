"""DeepSpeed's ZeRO stages under a plan: DeepSpeed shards and updates, the plan says what runs."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_mp.checkpoints.formats import without_file_protocol
from lightning_mp.checkpoints.zero import loads_alike, resumable
from lightning_mp.compat.checks import require_versions
from lightning_mp.compat.deepspeed import (
    FunctionalLinear,
    cast_partition,
    forget_gradients,
    halve_masters,
    initialize,
    trained_names,
)
from lightning_mp.compat.lightning import (
    DeepSpeedStrategy,
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
from lightning_mp.deepspeed_config import merge
from lightning_mp.deepspeed_config.read import load_json
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.zero import ZeroEngine
from lightning_mp.errors import Faults, MissingExtraError, PlanError
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import HALF
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.strategies import unfit
from lightning_mp.strategies.checkpoint_io import PortableCheckpoints, set_learning_rates
from lightning_mp.strategies.common import RunsPlan, plan_of
from lightning_mp.strategies.deepspeed.forward import (
    InsideEngine,
    by_dtype,
    gather_halves,
    load_full_state,
    regroup,
    split_by_dtype,
)

Json = Mapping[str, Any] | str | PathLike[str]


class PlanDeepSpeedStrategy(RunsPlan, PortableCheckpoints, DeepSpeedStrategy):
    """ZeRO stage 1, 2 or 3 under a plan, on CUDA, and on the CPU with gloo.

    Args:
        stage: what is partitioned: 1 optimizer state, 2 and gradients, 3 and parameters.
        offload_optimizer: keep optimizer state on the CPU.
        offload_parameters: keep parameters on the CPU (stage 3).
        config: a DeepSpeed JSON (a mapping or a path) to merge; what contradicts plan or Trainer is refused.
        policy: what the JSON is checked against at once; else it is checked when the run starts.
        host: further keywords of Lightning's ``DeepSpeedStrategy``.

    Raises:
        PlanError: a misspelt key, or a contradiction between JSON, plan and Trainer, with both values.
        MissingExtraError: DeepSpeed is not installed.
    """

    plan_engine = ZeroEngine
    own_formats = frozenset({"deepspeed"})

    def __init__(
        self,
        *,
        stage: int,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
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
        super().__init__(
            stage=stage, offload_optimizer=offload_optimizer, offload_parameters=offload_parameters, **host
        )
        self._host_defaults = self.config
        self._given = None if config is None else load_json(config)
        self._stage, self._offloads = stage, (offload_optimizer, offload_parameters)
        self._came_from: list[int] = []
        self._groups_before = 0
        self._linear = FunctionalLinear()
        self._accumulated = False
        if policy is not None and policy.precision != "auto":
            self.config = self._composed(policy)

    def _composed(self, policy: PrecisionPolicy) -> dict[str, Any]:
        """The JSON for ``policy``: the user's merged with the plan's, over Lightning's defaults."""
        from deepspeed.accelerator import get_accelerator

        composed = merge.compose(
            policy,
            self._given,
            stage=self._stage,
            offload_optimizer=self._offloads[0],
            offload_parameters=self._offloads[1],
            fp16_supported=bool(cast("Any", get_accelerator()).is_fp16_supported()),
        )
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
            return
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

    # ------------------------------------------------------------------ the model

    def check_plan(self, engine: StepEngine, module: nn.Module, faults: Faults) -> dict[str, Any] | None:
        """The JSON for the run at hand; notes what ZeRO cannot do, and changes nothing."""
        lightning_module = cast("LightningModule", module)
        trainer = lightning_module.trainer
        self.check_remote_folders(faults)
        by_norm = trainer.gradient_clip_algorithm != "value"
        if not by_norm and trainer.gradient_clip_val:
            faults.add(
                "gradient_clip_algorithm='value' with ZeRO", "'norm'", "clip by norm, or use strategy='mp_fsdp2'"
            )
        if is_overridden("backward", lightning_module, LightningModule):
            faults.add(
                "LightningModule.backward overridden with ZeRO",
                "move it to on_before_backward / on_after_backward, or use strategy='mp_fsdp2'",
            )
        _check_storage(engine.policy, engine.pin_map, self._stage, any(self._offloads), faults)
        unfit.refuse(module, "ZeRO", faults)
        unfit.refuse_weights(module, faults, why="ZeRO", whole=self._stage < 3)
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
                micro_batch=None,
            )
        except PlanError as error:
            faults.extend(fault for fault in error.faults if fault not in faults.found)
        return None

    def setup(self, trainer: Trainer) -> None:
        """Apply the plan, then hand the module and its optimizer to DeepSpeed."""
        assert self.accelerator is not None
        assert self.model is not None
        plan = plan_of(self)
        self._forward_redirection = InsideEngine(plan)
        self.accelerator.setup(trainer)
        self.config, self._config_initialized = plan.apply(self.model), True
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.init_deepspeed()
        self.setup_precision_plugin()
        self.barrier()

    def init_deepspeed(self) -> None:
        assert self.lightning_module is not None
        assert self.model is not None
        if self.lightning_module.trainer.training:
            self._initialize_deepspeed_train(self.model)
        else:
            self._initialize_deepspeed_inference(self.model)

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        step = cast("ZeroEngine", plan_of(self).engine)
        if optimizer is not None:
            self._check_optimizer(step, optimizer, lr_scheduler)
            self._groups_before = len(optimizer.param_groups)
            self._came_from = split_by_dtype(optimizer, lr_scheduler)
        for parameter in model.parameters():
            cast_partition(parameter)  # of those made partitioned, a pin has cast the empty shell
        trained = by_dtype(parameter for parameter in model.parameters() if parameter.requires_grad)
        groups = [{"params": members} for members in trained]
        engine, zero = self._engine_of(model, self.config, groups, optimizer, lr_scheduler)
        if self._stage < 3:
            halve_masters(zero, HALF)  # the policy's optimizer state is half precision too
        step.came_from = self._came_from
        return engine, zero

    def _check_optimizer(self, step: ZeroEngine, optimizer: Optimizer, scheduler: Any) -> None:
        with Faults("strategy") as faults:
            step.check_optimizers([optimizer], faults)
            if scheduler is not None and "scheduler" in (self.config or {}):
                given = cast("Any", self.config)["scheduler"]
                both = f"scheduler={given!r} in the JSON and {type(scheduler).__name__} in configure_optimizers"
                faults.add(both, "one of the two", "remove one")

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """An engine without an optimizer; stage 3 gathers, the others have whole parameters."""
        assert isinstance(self.config, dict)
        config = {"train_micro_batch_size_per_gpu": 1, **{key: self.config[key] for key in ("fp16", "bf16")}}
        if self._stage == 3:
            config |= {key: self.config[key] for key in ("zero_allow_untested_optimizer", "zero_optimization")}
            remove_module_hooks(model)  # those of a training engine, which would gather a second time
        self.model, _ = self._engine_of(model, config, [], None, None)

    def _engine_of(self, model: nn.Module, config: Any, groups: Any, optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
        self._linear.remember()
        engine, zero = initialize(
            model,
            args=Namespace(device_rank=self.local_rank),  # as Lightning, but a CPU has no index
            config=config,
            model_parameters=groups,
            optimizer=optimizer,
            lr_scheduler=scheduler,
        )
        if self._stage == 3:
            gather_halves(model, plan_of(self), zero)
        return engine, zero

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
        self._linear.remember()
        with deepspeed.zero.Init(remote_device=self.remote_device, config_dict_or_path=config):
            yield

    def teardown(self) -> None:
        """Put back what DeepSpeed changed in the process; Lightning calls it after success and after failure."""
        self._linear.restore()
        super().teardown()

    # ------------------------------------------------------------------ the step

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Backward through DeepSpeed, told whether it is the last one before a step."""
        module = self.lightning_module
        assert module is not None
        accumulating = module.automatic_optimization and accumulates(module.trainer)
        if self._accumulated and self._stage < 3 and begins_window(module.trainer, module.trainer.fit_loop.batch_idx):
            forget_gradients(self.deepspeed_engine.optimizer)  # of a window that an epoch left out in its midst
            self._accumulated = False
        self.deepspeed_engine.set_gradient_accumulation_boundary(not accumulating)
        self._accumulated = accumulating
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def on_train_end(self) -> None:
        """The last batch's hooks may have changed weights too."""
        cast("ZeroEngine", plan_of(self).engine).check_weights()

    # ------------------------------------------------------------------ checkpoints

    @property
    def saves_folders(self) -> bool:
        return True

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save through DeepSpeed; schedulers as if no param group had been split."""
        if len(self._came_from) != self._groups_before:
            first = [self._came_from.index(group) for group in range(self._groups_before)]
            for state in checkpoint.get("lr_schedulers", ()):
                regroup(state, len(self._came_from), first)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder that as many ranks of the same stage wrote with everything, all else without optimizer state.

        Raises:
            CheckpointFormatError: no checkpoint.
        """
        path = without_file_protocol(self.broadcast(checkpoint_path))
        with self._optimizers_while_fitting():
            checkpoint = super().load_checkpoint(path, weights_only=weights_only)
            cast("ZeroEngine", plan_of(self).engine).override_zero_settings()
            for state in checkpoint.get("lr_schedulers", ()) if len(self._came_from) != self._groups_before else ():
                regroup(state, self._groups_before, self._came_from)
            if not self.reads(path):
                set_learning_rates(self.optimizers, checkpoint)
        return checkpoint

    def reads(self, path: Any) -> bool:
        alike = super().reads(path) and resumable(Path(path), self._stage, self.world_size)
        module = cast("nn.Module", self.lightning_module)
        groups = [group for zero in self.optimizers for group in trained_names(zero, module)] if self._stage < 3 else []
        return alike and (not groups or loads_alike(Path(path), groups))

    def load_full(self, checkpoint: dict[str, Any]) -> None:
        """Load whole weights into the partitions."""
        module = self.lightning_module
        assert module is not None
        if checkpoint.pop("optimizer_states", None):
            rank_zero_info("Optimizer state of another strategy does not fit ZeRO's partitions: it starts at zero.")
        state = checkpoint["state_dict"]
        if self._stage < 3:
            module.load_state_dict(state, strict=module.strict_loading)
        else:
            load_full_state(module, state, strict=module.strict_loading)
        for zero in self.optimizers:
            cast("Any", zero).refresh_fp32_params()


def _check_storage(policy: PrecisionPolicy, pin_map: PinMap, stage: int, offload: bool, faults: Faults) -> None:
    """Half-precision weights that are trained: only ZeRO-1/2 can be made to keep no fp32 copy of them."""
    if stage < 3 and not offload:
        return
    trained = (one for one in pin_map.members if any(p.requires_grad for p in one.module.parameters(recurse=False)))
    halves = [
        f"pin {pin.pattern!r} to {pin.dtype}"
        for pin in dict.fromkeys(one.pin for one in trained)
        if pin.dtype != "fp32"
    ]
    why = "ZeRO-3" if stage == 3 else "ZeRO's optimizer offload"
    for given in halves if policy.storage_dtype == "fp32" else [f"precision={policy.precision!r}"]:
        faults.add(
            f"{given} with {why}, which keeps fp32 weights and optimizer state of what is trained",
            f"use {policy.precision.replace('true', 'mixed')!r} without such pins, or strategy='mp_fsdp2' or "
            "'mp_deepspeed_zero2'",
        )
