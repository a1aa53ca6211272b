"""The strategy of DeepSpeed's ZeRO stages under a plan.

DeepSpeed partitions and updates, the plan sets precision.
"""

import os
import warnings
from argparse import Namespace
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_mp.checkpoints.formats import CheckpointFormatError, deepspeed_folder, is_remote_path
from lightning_mp.checkpoints.full import loads_alike, read_model_states, read_weights, resumable
from lightning_mp.checkpoints.lazy import LazyWeights
from lightning_mp.compat import deepspeed as compat
from lightning_mp.compat import patched, require_versions
from lightning_mp.compat.lightning import (
    DeepSpeedStrategy,
    ForwardRedirection,
    LightningModule,
    Trainer,
    TrainerFn,
    accumulates,
    begins_window,
    is_overridden,
    is_stand_in,
    rank_zero_info,
    remove_module_hooks,
    reset_seed,
)
from lightning_mp.compat.torch import INNER_SCHEDULERS, load_own_tensors
from lightning_mp.deepspeed import merge
from lightning_mp.deepspeed.adapters import gather_to_merge
from lightning_mp.deepspeed.engine import ZeroEngine, refuse
from lightning_mp.deepspeed.read import SUBJECT, JsonLike, load_json
from lightning_mp.errors import Faults, MissingExtraError, PlanError
from lightning_mp.fsdp2.units import cannot_initialise, materialize
from lightning_mp.modules import half_weights
from lightning_mp.modules.outermost import OutermostCalls
from lightning_mp.modules.patterns import plain_name
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import HALF, map_tensors, to_torch
from lightning_mp.plan import optimizer_facts
from lightning_mp.plan.engine import StepEngine
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.strategies.base import PlanStrategy, plan_of, refuse_callbacks, refuse_weights, set_learning_rates

_REMOTE = "'{}' for DeepSpeed's checkpoints, whose files go to a local disk alone"
_LOCAL = "give ModelCheckpoint(dirpath=...) a local folder, or use strategy='mp_fsdp2', whose shards go anywhere"


class InsideEngine(ForwardRedirection):
    """Lightning's forward redirection, with the plan's context *inside* DeepSpeed's forward.

    DeepSpeed turns autocast off around its module.
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        #: the hooks around forward passes between steps, ``None`` without half weights
        self.between_steps: OutermostCalls | None = None

    def __call__(self, wrapper_module: Any, original_module: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the method, run as the forward of ``wrapper_module``.

        The method runs in the plan's forward context, the rest of the wrapper outside of autocast.
        The module's own forward is in place again before the method runs. Hooks around forward
        passes between steps pause.
        """
        if self.between_steps is not None:
            with self.between_steps.paused():
                return self._inside(wrapper_module, original_module, method_name, *args, **kwargs)
        return self._inside(wrapper_module, original_module, method_name, *args, **kwargs)

    def _inside(self, wrapper_module: Any, original_module: Any, method_name: str, *args: Any, **kwargs: Any) -> Any:
        instead = ExitStack()

        def step(*inner: Any, **named: Any) -> Any:
            instead.close()
            with self._plan.forward_context():
                return getattr(original_module, method_name)(*inner, **named)

        with instead, torch.autocast(original_module.device.type, enabled=False):
            instead.enter_context(patched(original_module, forward=step))
            return wrapper_module(*args, **kwargs)


class HalfWeightsBetweenSteps:
    """Hooks that run forward passes of hooks and callbacks in the plan's context.

    Half weights could not multiply fp32 inputs. Half outputs are cast to fp32, because under DDP
    such a forward is outside of autocast. A call that is under autocast already stays as it is.
    Nothing here is a collective.
    """

    def __init__(self, module: nn.Module, plan: Any, device: torch.device) -> None:
        self._plan, self._device = plan, device
        self.calls = OutermostCalls(module, self._begin, self._end)
        self._call = ExitStack()
        self._in_fp32 = False

    def _begin(self, _module: nn.Module) -> None:
        self._in_fp32 = not torch.is_autocast_enabled(self._device.type)
        if self._in_fp32:
            self._call.enter_context(self._plan.forward_context())

    def _end(self, _module: nn.Module, output: Any) -> Any:
        self._call.close()
        return map_tensors(output, self._widen) if self._in_fp32 else None

    @staticmethod
    def _widen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class PlanDeepSpeedStrategy(PlanStrategy, DeepSpeedStrategy):
    """ZeRO stage 1, 2 or 3 under a plan, on CUDA, and on the CPU with gloo.

    Args:
        stage: 1 partitions optimizer state, 2 gradients too, 3 parameters too.
        offload_optimizer: keep optimizer state on the CPU.
        offload_parameters: keep parameters on the CPU (stage 3).
        half_weights: in training, hold weights of matrix products in the compute dtype, next to
            partitioned fp32 master weights (stage 1 and 2, mixed modes). Code that reads a weight
            between steps gets the rounded value.
        config: a DeepSpeed JSON (a mapping or a path) to merge. The environment variable of
            Lightning's strategy names one too. A contradiction to plan or Trainer is refused.
        policy: the policy that the JSON is checked against at once. Without it the check is made
            when a run starts.
        host: other keywords of Lightning's ``DeepSpeedStrategy``.

    Raises:
        PlanError: a misspelt key, ``half_weights`` with stage 3 or offload, or a contradiction
            between JSON, plan and Trainer, with both values.
        MissingExtraError: DeepSpeed is not installed.
    """

    plan_engine = ZeroEngine
    own_format = "deepspeed"
    saves_folders = True
    #: Lightning accumulates, as under any strategy, and :meth:`backward` marks the last pass of a
    #: window
    handles_gradient_accumulation: Any = False
    block_backward_sync: Any = nullcontext
    #: for each param group in the engine, the index of the user's group that it was split off
    _source_group: Sequence[int] = ()
    #: an empty list that stands for the optimizer states of a folder that DeepSpeed loads, else
    #: ``None``
    _states_of_folder: list[Any] | None = None
    #: the JSON's block ``optimizer``, which DeepSpeed follows only if ``configure_optimizers`` makes none
    _optimizer_of_json: Any = None
    #: in training, the param groups that stage 1 or 2 holds in half precision
    _half_groups: compat.HalfGroups | None = None

    def __init__(
        self,
        *,
        stage: int,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        half_weights: bool = False,
        config: JsonLike | None = None,
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
        self._zero: dict[str, Any] = {
            "stage": stage,
            "offload_optimizer": offload_optimizer,
            "offload_parameters": offload_parameters,
        }
        super().__init__(**self._zero, **host)
        self._host_defaults = self.config
        self._given = None if config is None else load_json(config)
        self._stage, self.half_weights = stage, half_weights
        if half_weights and (stage == 3 or offload_optimizer):
            given = "stage=3, which gathers them so already" if stage == 3 else "offload_optimizer=True"
            raise PlanError.of(f"half_weights=True with {given}", "remove one", "strategy")
        if policy is not None and policy.precision != "auto":
            with Faults(SUBJECT) as faults:
                self.config = self._composed(policy, faults)

    def _composed(self, policy: PrecisionPolicy, faults: Faults) -> dict[str, Any]:
        """Return the JSON for ``policy``: the user's and the plan's over Lightning's defaults.

        Contradictions are added to ``faults``.
        """
        from deepspeed.accelerator import get_accelerator

        accelerator: Any = get_accelerator()
        supported = bool(accelerator.is_fp16_supported())
        composed = merge.compose(policy, self._given, faults, **self._zero, fp16_supported=supported)
        return merge.over(self._host_defaults, composed)

    def _load_config(self, config: JsonLike | None) -> None:
        """Do nothing: ``_composed`` merges the JSON with the plan's and Lightning's."""

    def completed(self, policy: PrecisionPolicy) -> PrecisionPolicy:
        """Return ``policy``, with the JSON's loss scale if the policy has the default scale."""
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

    # ------------------------------------------------------------------ the model

    def check_plan(self, engine: StepEngine, module: nn.Module, faults: Faults) -> dict[str, Any]:
        """Return the JSON of this run.

        Add a fault for anything that ZeRO cannot do. Change nothing.
        """
        lightning_module = cast("LightningModule", module)
        trainer = lightning_module.trainer
        saving: list[Any] = trainer.checkpoint_callbacks if trainer.state.fn == TrainerFn.FITTING else []
        folders = dict.fromkeys(getattr(callback, "dirpath", None) or "" for callback in saving)
        for folder in filter(is_remote_path, folders):
            faults.add(_REMOTE.format(folder), fix=_LOCAL)
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
        cannot_initialise(module, faults)
        return merge.add_trainer(
            self._composed(engine.policy, faults),
            faults,
            clip_norm=trainer.gradient_clip_val if by_norm else None,
            accumulate=trainer.accumulate_grad_batches,
            world_size=self.world_size,
        )

    def setup(self, trainer: Trainer) -> None:
        """Apply the plan to the module in place, then give it and its optimizer to DeepSpeed.

        A collective: every rank calls it.
        """
        assert self.accelerator is not None
        plan, module = plan_of(self), self._user_module
        self._forward_redirection = InsideEngine(plan)
        self.accelerator.setup(trainer)
        config: dict[str, Any] = plan.apply(module)
        # With the block in the config, Lightning makes its optimizer and does not call
        # configure_optimizers.
        self._optimizer_of_json = config.pop("optimizer", None)
        self.config, self._config_initialized = config, True
        self._make_whole(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        if trainer.training:
            self._initialize_deepspeed_train(module)
        else:
            self._initialize_deepspeed_inference(module)
        self._engine.timeout = self._timeout
        self.setup_precision_plugin()
        self.barrier()

    def _init_optimizers(self) -> tuple[Any, Any]:
        """Return the optimizer and the schedule that ``configure_optimizers`` makes, as Lightning keeps them.

        If it makes none, put the JSON's ``optimizer`` back into the config and return ``(None,
        None)``. DeepSpeed then makes the optimizer. A line is logged if the JSON's optimizer is not
        used, or if its schedule is.

        Raises:
            PlanError: there is no optimizer at all, or DeepSpeed cannot make the JSON's optimizer
                or schedule.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`LightningModule.configure_optimizers` returned `None`")
            optimizer, schedule = super()._init_optimizers()
        assert isinstance(self.config, dict)
        of_json, schedule_of_json = self._optimizer_of_json, self.config.get("scheduler")
        if is_stand_in(optimizer):
            with Faults("strategy") as faults:
                if of_json is None:
                    fix = "return an optimizer, or use strategy='mp_ddp'"
                    faults.add("configure_optimizers() returned None with ZeRO, which steps the optimizer", fix=fix)
                else:
                    merge.check_made_by_engine("optimizer", of_json, faults)
                    _check_optimizer_type(of_json, faults)
                if schedule_of_json is not None:
                    merge.check_made_by_engine("scheduler", schedule_of_json, faults)
            self.config["optimizer"] = of_json
            return None, None
        made = type(optimizer).__name__
        if of_json is not None:
            rank_zero_info(f"optimizer={of_json!r} in the JSON is not used: configure_optimizers() makes {made}")
        if schedule is None and schedule_of_json is not None:
            with Faults("strategy") as faults:
                merge.check_made_by_engine("scheduler", schedule_of_json, faults)
            rank_zero_info(
                f"scheduler={schedule_of_json!r} in the JSON sets the learning rates of {made}: configure_optimizers() "
                "makes no schedule"
            )
        return optimizer, schedule

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Do as Lightning: DeepSpeed makes the optimizers later.

        Raises:
            RuntimeError: training has begun, and DeepSpeed's engine would step the optimizer of the
                start.
        """
        self._engine.refuse_new_optimizers()
        super().setup_optimizers(trainer)

    def _setup_model_and_optimizer(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any = None
    ) -> tuple[Any, Any]:
        """Return DeepSpeed's engine and ZeRO's optimizer. Every rank calls it.

        Param groups of ``optimizer`` that hold several dtypes are split in place. With ``None``,
        DeepSpeed makes the JSON's optimizer.

        Raises:
            PlanError: the optimizer cannot step pieces of flat tensors, or there are two
                schedulers.
        """
        names = self._half_names(model) if self.half_weights else {}
        if optimizer is not None:
            with Faults("strategy") as faults:
                self._engine.check_optimizers([optimizer], faults)
                given: Any = (self.config or {}).get("scheduler")
                if lr_scheduler is not None and given is not None:
                    both = f"scheduler={given!r} in the JSON and {type(lr_scheduler).__name__} in configure_optimizers"
                    faults.add(both, fix="remove one")
            self._source_group = self._engine.source_group = split_by_dtype(optimizer, lr_scheduler, names)
        for parameter in model.parameters():
            compat.cast_partition(parameter)  # a pin casts the empty tensor that zero.Init() leaves
        trained = by_dtype((parameter for parameter in model.parameters() if parameter.requires_grad), names)
        groups = [{"params": members} for members in trained]
        engine, zero = self._engine_of(model, self.config, groups, optimizer, lr_scheduler)
        if optimizer is None:
            with Faults("strategy") as faults:
                self._engine.check_optimizers([zero.optimizer], faults)
        if self._stage < 3:
            compat.halve_masters(zero, HALF)  # optimizer state of half weights is half too
        if names:
            self._half_groups = compat.HalfGroups(zero, names, self._compute_dtype)
            calls = HalfWeightsBetweenSteps(model, plan_of(self), self.root_device).calls
            cast("InsideEngine", self._forward_redirection).between_steps = calls
            calls.start()
        return engine, zero

    def _initialize_deepspeed_inference(self, model: nn.Module) -> None:
        """Make an engine without an optimizer.

        Stage 3 gathers, the other stages have whole parameters.
        """
        assert isinstance(self.config, dict)
        config = {"train_micro_batch_size_per_gpu": 1, **{key: self.config[key] for key in ("fp16", "bf16")}}
        if self._stage == 3:
            config |= {key: self.config[key] for key in ("zero_allow_untested_optimizer", "zero_optimization")}
            remove_module_hooks(model)  # hooks of a training engine would gather a second time
        self.model, _ = self._engine_of(model, config, [], None, None)

    def _engine_of(self, model: nn.Module, config: Any, groups: Any, optimizer: Any, scheduler: Any) -> tuple[Any, Any]:
        engine, zero = compat.initialize(
            model,
            args=Namespace(device_rank=self.local_rank),  # as Lightning, but a CPU has no index
            config=config,
            model_parameters=groups,
            optimizer=optimizer,
            lr_scheduler=scheduler,
        )
        if self._stage == 3:
            # Weights that only autocast computes with are gathered in the compute dtype. Partitions
            # stay as stored.
            names = self._half_names(model)
            dtypes = dict.fromkeys(names, self._compute_dtype)
            gathered = {id(one) for one in model.parameters() if compat.gather_as(one, dtypes.get(id(one)))}
            self._engine.halves = {key: name for key, name in names.items() if key in gathered}
            compat.reduce_as_stored(zero)
            gather_to_merge(model)
        return engine, zero

    @property
    def _compute_dtype(self) -> torch.dtype:
        return to_torch(plan_of(self).policy.compute_dtype)

    def _half_names(self, model: nn.Module) -> dict[int, str]:
        """Return the names of fp32 weights that only autocast computes with, by ``id``.

        Vectors count in stage 3 only.
        """
        weights = half_weights.survey(model, self._engine.pin_map, plan_of(self).policy)
        fp32 = (weight for weight in weights if weight.tensor.dtype == torch.float32)
        return {id(weight.tensor): weight.name for weight in fp32 if self._stage == 3 or weight.tensor.dim() > 1}

    #: ``configure_model`` makes a whole model, which DeepSpeed partitions when the run starts.
    #: Under ``deepspeed.zero.Init``, code that initialises or loads weights after their module was
    #: made would write to empty tensors: transformers, ``from_pretrained``, torch's attention.
    model_sharded_context: Any = nullcontext

    def _make_whole(self, module: nn.Module) -> None:
        """Allocate and initialise tensors of the meta device, under stage 3 on the CPU.

        A collective if there are any.

        Raises:
            PlanError: a module's initialisation left a tensor untouched.
        """
        place = torch.device("cpu") if self._stage == 3 else self.root_device
        materialize(module, module, place, self.root_device)

    def teardown(self) -> None:
        """Undo DeepSpeed's changes of the process.

        Lightning calls it after success and after failure.
        """
        compat.restore_linear()
        self._release(gather=self.world_size == 1)  # after a failure other ranks may not take part
        super().teardown()

    def _release(self, *, gather: bool = True) -> None:
        """Make half weights fp32 and remove hooks. With ``gather`` it is a collective."""
        between_steps = getattr(self._forward_redirection, "between_steps", None)
        if between_steps is not None:
            between_steps.stop()
        if self._half_groups is not None:
            self._half_groups.release(gather=gather)
            self._half_groups = None

    def _fp32_weights(self) -> AbstractContextManager[None]:
        return nullcontext() if self._half_groups is None else self._half_groups.fp32()

    # ------------------------------------------------------------------ the step

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward through DeepSpeed, and mark the last pass of a window for it."""
        module = self._user_module
        automatic = module.automatic_optimization
        if automatic and begins_window(module.trainer, module.trainer.fit_loop.batch_idx):
            self._engine.begin_window()
        self.deepspeed_engine.set_gradient_accumulation_boundary(not (automatic and accumulates(module.trainer)))
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def on_train_end(self) -> None:
        """Take the last hooks' writes to weights, make half weights fp32, and share buffers.

        A collective.

        Raises:
            RuntimeError: see :meth:`ZeroEngine.check_weights`.
        """
        self._engine.check_weights()
        self._release()
        self.share_buffers()

    on_validation_start = on_test_start = on_predict_start = PlanStrategy.share_buffers

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save a folder through DeepSpeed. A collective.

        The states of schedulers in ``checkpoint`` are changed: they have an entry for each of the
        user's param groups.

        Raises:
            CheckpointFormatError: ``filepath`` is not on a local disk.
            RuntimeError: the engine is one of ZeRO-3 for evaluation, or a weight was written to
                where it is lost.
        """
        if is_remote_path(filepath):
            raise CheckpointFormatError(_REMOTE.format(filepath), _LOCAL)
        if self.deepspeed_engine.checkpoint_engine is None:
            refuse(
                "trainer.save_checkpoint() after trainer.validate() or test() with ZeRO-3, whose engine then has no "
                "optimizer to save",
                "save before it, or by ModelCheckpoint in the fit",
            )
        first_piece = [self._source_group.index(group) for group in sorted({*self._source_group})]
        for state in checkpoint.get("lr_schedulers", ()):
            regroup(state, len(self._source_group), first_piece)
        # A checkpoint holds the masters. After the fit there is no engine, and on_train_end has
        # taken writes.
        if self.optimizers and self._engine is not None:
            self._engine.check_weights()
            self._engine.take_writes()
        with self._fp32_weights():
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._states_of_folder = None
        return super().load_checkpoint(checkpoint_path, weights_only)

    def open_folder(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        """Return the checkpoint of a DeepSpeed folder with lazy weights, without optimizer states.

        :meth:`load_model_state_dict` then lets DeepSpeed load the optimizer states.
        """
        file = compat.model_states_file(self.deepspeed_engine, str(deepspeed_folder(Path(path))))
        content, names = read_model_states(Path(file))
        self._states_of_folder = []
        weights = LazyWeights(names, partial(read_weights, path))
        return {**content, "state_dict": weights, "optimizer_states": self._states_of_folder}

    def reads(self, path: Any) -> bool:
        """True if DeepSpeed can load the checkpoint at ``path`` by itself.

        World size and param groups have to be equal, and the stage, except that ZeRO-1 and 2 load
        each other's folders. Under ZeRO-3 it is False outside of a fit.
        """
        if self._stage == 3 and self._user_module.trainer.state.fn != TrainerFn.FITTING:
            return False  # an engine without an optimizer loads whole weights only
        alike = super().reads(path) and resumable(Path(path), self._stage, self.world_size)
        names = {id(parameter): name for name, parameter in self._user_module.named_parameters()}
        flat = [group for zero in self.optimizers for group, _ in compat.partitions(zero)]
        groups = [[plain_name(names[id(parameter)]) for parameter in group] for group in flat]
        return alike and (not groups or loads_alike(Path(path), groups))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the checkpoint's weights, and the optimizer state of a folder that fits.

        The weights are those that hooks left in the checkpoint.
        DeepSpeed loads both at once. Weights that a hook changed are loaded afterwards. A
        collective.

        Raises:
            RuntimeError: see :meth:`load_whole_weights`.
        """
        weights = checkpoint["state_dict"]
        untouched = isinstance(weights, LazyWeights) and not weights.touched
        mine = self._states_of_folder
        if mine is not None and mine is not checkpoint.get("optimizer_states"):
            self._folder = self._states_of_folder = None  # a hook took the optimizer states out
        with self._optimizers_while_fitting(), self._fp32_weights():
            left_out = {}
            if self._folder is not None:
                left_out = {} if untouched else whole_values(self._user_module, without=weights.keys())
                DeepSpeedStrategy.load_checkpoint(self, self._folder)
            if self._folder is None or not untouched:
                self.load_whole_weights(dict(weights), strict=strict)
            if left_out:
                self.load_whole_weights(left_out, strict=False)
            self._engine.override_zero_settings()

    def load_whole_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Load whole weights into the partitions.

        Raises:
            RuntimeError: a shape differs, or ``strict`` and a name is missing or unexpected. Under
                ZeRO-3 also an empty tensor that a hook took from the module's own state dict.
        """
        module = self._user_module
        if self._stage < 3:
            module.load_state_dict(weights, strict=strict)
        else:
            refuse_partitioned(module, weights)
            load_full_state(module, weights, strict=strict)
        zero: Any
        for zero in self.optimizers:
            zero.refresh_fp32_params()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Set the schedulers' learning rates, unless DeepSpeed has loaded optimizer states.

        The schedulers' states in ``checkpoint`` are changed: they have an entry for each group of
        the engine. Optimizer states of another strategy are not loaded, and a line says so.
        """
        for state in checkpoint.get("lr_schedulers", ()):
            regroup(state, len({*self._source_group}), self._source_group)
        if self._states_of_folder is not None:
            return
        if checkpoint["optimizer_states"]:
            rank_zero_info("Optimizer state of another strategy does not fit ZeRO's partitions: it starts at zero.")
        set_learning_rates(self.optimizers, checkpoint)


def _check_storage(policy: PrecisionPolicy, pin_map: PinMap, zero: Mapping[str, int], faults: Faults) -> None:
    """Add a fault for half-precision weights that are trained under ZeRO-3 or offload.

    Only ZeRO-1 and 2 without offload can keep no fp32 copy of them.
    """
    if zero["stage"] < 3 and not zero["offload_optimizer"] and not zero["offload_parameters"]:
        return
    if policy.storage_dtype == "fp32":
        trained = (one for one in pin_map.members if any(p.requires_grad for p in one.module.parameters(recurse=False)))
        pins = dict.fromkeys(one.pin for one in trained if one.pin.dtype != "fp32")
        refused = [f"pin {pin.pattern!r} to {pin.dtype}" for pin in pins]
    else:
        refused = [f"precision={policy.precision!r}"]
    why = "ZeRO-3" if zero["stage"] == 3 else "ZeRO's optimizer offload"
    for given in refused:
        mixed = policy.precision.replace("true", "mixed")
        faults.add(
            f"{given} with {why}, which keeps fp32 weights and optimizer state of what is trained",
            fix=f"use {mixed!r} without such pins, or strategy='mp_fsdp2' or 'mp_deepspeed_zero2'",
        )


def _check_optimizer_type(block: Any, faults: Faults) -> None:
    """Add a fault if the JSON's optimizer needs whole parameters.

    The check comes before DeepSpeed compiles the optimizer's kernel.
    """
    kind = block.get("type") if isinstance(block, Mapping) else None
    if isinstance(kind, str) and optimizer_facts.needs_whole_parameters(kind):
        given = f"optimizer.type={kind!r} in the JSON, which needs whole parameters"
        faults.add(given, fix="use 'AdamW' or 'SGD', or return it from configure_optimizers() with strategy='mp_ddp'")


def refuse_partitioned(module: nn.Module, weights: Mapping[str, Any]) -> None:
    """Raise RuntimeError if one of ``weights`` is the empty tensor of a partitioned parameter."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = weights.get(plain_name(name))
        if isinstance(value, Tensor) and not value.numel() and compat.numbers_of_split(parameter):
            refuse(
                f"on_load_checkpoint put {name!r} of the module's own state_dict() into the checkpoint, with ZeRO-3, "
                "which holds it in partitions: it is empty there",
                "compare shapes with parameter.ds_shape, or use strategy='mp_deepspeed_zero2' or 'mp_fsdp2'",
            )


def whole_values(module: nn.Module, *, without: Collection[str]) -> dict[str, Tensor]:
    """Return copies of the state dict's tensors, whole, by name. Every rank calls it.

    Tensors with a name in ``without`` are left out, under all their names.
    """
    import deepspeed

    values: dict[str, Tensor] = {}
    elsewhere = {id(tensor) for name, tensor in _saved_tensors(module) if plain_name(name) in without}
    for name, tensor in _saved_tensors(module):
        if plain_name(name) not in without and id(tensor) not in elsewhere:
            with deepspeed.zero.GatheredParameters([tensor]) if compat.is_partitioned(tensor) else nullcontext():
                values[name] = tensor.detach().clone()
    return values


def _saved_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    saved = nn.Module.state_dict(module, keep_vars=True)
    return [(name, value) for name, value in saved.items() if isinstance(value, Tensor)]


def load_full_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load whole weights into a module that ZeRO-3 partitioned, one submodule gathered at a time.

    A collective: every rank has all of ``state``. Lightning's own way loads buffers on rank 0 only,
    and ignores names that are missing or do not fit.

    Raises:
        RuntimeError: a shape differs, or ``strict`` and a name is missing or unexpected.
    """
    import deepspeed

    left = dict(state)  # hooks of modules rename weights of an earlier version in it
    missing, unexpected, errors = list[str](), list[str](), list[str]()
    for name, part in module.named_modules():
        with deepspeed.zero.GatheredParameters(list(part.parameters(recurse=False)), modifier_rank=0):
            load_own_tensors(part, left, f"{name}." if name else "", missing, unexpected, errors)
    if strict and (missing or unexpected):
        errors.append(f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}")
    if errors:
        raise RuntimeError(f"Error(s) in loading state_dict for {type(module).__name__}: " + "\n\t".join(errors))


# ------------------------------------------------------------------ param groups of one dtype each

#: endings of the names of a scheduler's lists that have an entry for each group, in torch and
#: elsewhere
_PER_GROUP = ("lr", "lrs", "lambdas", "momentums")


def _kind(parameter: Tensor, halves: Container[int]) -> tuple[int, bool, str]:
    """Return the key by which parameters are put into lists and sorted.

    Fp32 is first, because DeepSpeed takes the first parameter's dtype as the engine's. Frozen
    parameters are last.
    """
    if not parameter.requires_grad:
        return 2, False, ""
    half = id(parameter) in halves
    return int(half or parameter.dtype != torch.float32), not half, str(parameter.dtype)


def by_dtype(parameters: Iterable[Tensor], halves: Container[int] = ()) -> list[list[Tensor]]:
    """Return lists of trained parameters of one dtype each, fp32 first.

    ``[[]]`` without parameters. Frozen parameters, which DeepSpeed does not flatten, are at the end
    of the first list. ``halves`` are the ``id`` of parameters that get a list of their own.
    """
    lists: dict[tuple[int, bool, str], list[Tensor]] = {}
    for parameter in parameters:
        lists.setdefault(_kind(parameter, halves), []).append(parameter)
    first, *rest = [lists[kind] for kind in sorted(lists)] or [[]]
    frozen = rest.pop() if rest and not rest[-1][0].requires_grad else []
    return [first + frozen, *rest]


def split_by_dtype(optimizer: Optimizer, scheduler: Any, halves: Container[int] = ()) -> list[int]:
    """Split param groups of several dtypes in place.

    Return the index of the old group for each new group. Groups with fp32 parameters to train come
    first, and groups without parameters to train last. Lists of ``scheduler`` with an entry for
    each group are reordered in place. ``scheduler`` may be ``None``.
    """
    old = optimizer.param_groups
    pieces = [(index, members) for index, group in enumerate(old) for members in by_dtype(group["params"], halves)]
    pieces.sort(key=lambda piece: _kind(piece[1][0], halves)[0] if piece[1] else 2)  # stable
    source_group = [index for index, _ in pieces]
    groups = [dict(old[at]) if at in source_group[:place] else old[at] for place, at in enumerate(source_group)]
    for group, (_, members) in zip(groups, pieces, strict=True):
        group["params"] = members
    if scheduler is not None:
        regroup(vars(scheduler), len(old), source_group)
    optimizer.param_groups[:] = groups
    return source_group


def regroup(state: dict[str, Any], size: int, source_group: Sequence[int]) -> None:
    """Reorder lists of a scheduler's ``state`` in place.

    The new entry ``i`` of a list is its old entry ``source_group[i]``. Only lists of ``size``
    entries whose name ends as in ``_PER_GROUP`` are reordered. A list of milestones may have
    ``size`` entries by chance.
    """
    for inner in state.get(INNER_SCHEDULERS, ()):
        regroup(inner if isinstance(inner, dict) else vars(inner), size, source_group)
    for key, value in state.items():
        if isinstance(value, list) and key.endswith(_PER_GROUP) and len(cast("list[Any]", value)) == size:
            state[key] = [value[index] for index in source_group]
