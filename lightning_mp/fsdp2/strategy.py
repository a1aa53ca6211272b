"""FSDP2 strategies for any LightningModule: apply the plan, shard the model, gather its weights."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.tensor.parallel import ParallelStyle
from torch.optim import Optimizer

from lightning_mp.checkpoints.formats import by_parameter
from lightning_mp.checkpoints.full import index_of, read_optimizer_states, read_weights
from lightning_mp.checkpoints.lazy import LazyStates, LazyWeights
from lightning_mp.compat import patched, torchao
from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.lightning import (
    Callback,
    ModelParallelStrategy,
    Trainer,
    TrainerFn,
    TrainerStatus,
    default_pg_timeout,
    is_overridden,
    optimizers_to_device,
    set_mesh,
)
from lightning_mp.compat.torch import norms
from lightning_mp.errors import Faults, PlanError
from lightning_mp.fsdp2 import saving, tensor_parallel
from lightning_mp.fsdp2.between_steps import BetweenSteps
from lightning_mp.fsdp2.engine import ShardedEngine
from lightning_mp.fsdp2.saving import Saves
from lightning_mp.fsdp2.units import (
    Wrap,
    broadcast_from_first,
    cannot_initialise,
    materialize,
    notes_on_parameters,
    restore_notes,
    shard,
    units,
    whole_on_cpu,
)
from lightning_mp.modules.fp8 import is_converted
from lightning_mp.modules.half_weights import AutocastWeight, survey
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.numerics.grads import parameters_of
from lightning_mp.plan.engine import StepEngine
from lightning_mp.plan.for_strategy import check_users_sharding
from lightning_mp.strategies.base import PlanStrategy, plan_of, refuse_callbacks, refuse_gradients, refuse_weights

#: the blocks to compile, the units except the root with inner units first, and tensor-parallel
#: styles by name
Layout = tuple[list[nn.Module], list[nn.Module], dict[str, ParallelStyle]]


class _InFP8(sharding_compat.GatherExtension):
    """All-gather hooks of one shard: encode it to FP8 before, decode the weight after.

    A copy is the object itself.
    """

    module: nn.Module
    emulate: bool
    scale: Tensor

    def __deepcopy__(self, memo: Any) -> _InFP8:
        return self

    def before(self, mesh: Any) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return the tensors to all-gather and the scale. Shards are padded to equal sizes."""
        # Sent as uint8, because gloo has no FP8.
        data = torchao.rounded(self.local.detach(), self.scale).view(torch.uint8)
        missing = -(-self.shard.shape[0] // mesh.size()) - data.shape[0]
        return (nn.functional.pad(data, (0, 0, 0, missing)) if missing else data,), self.scale

    def after(self, outputs: tuple[Tensor, ...], scale: Tensor, dtype: torch.dtype, *, out: Any = None) -> Any:
        """Return the FP8 weight and no tensors to free.

        With ``out``, set its scale and return ``None``.
        """
        if out is None:
            return torchao.weight(outputs[0], scale, dtype, emulate=self.emulate), ()
        torchao.set_scale(out, scale)
        return None


class PlanFSDP2Strategy(PlanStrategy, ModelParallelStrategy):
    """``fully_shard`` under a plan, without ``configure_model`` in the user's module.

    Args:
        wrap: module classes, names of classes or patterns that become shard units. Default:
            transformers' ``_no_split_modules``, else modules of 100M parameters.
        device_mesh: ``(replicas, shards)``: shard within a group, replicate across groups (HSDP).
        data_parallel_size: the number of ranks with their own data, unless ``device_mesh`` gives
            it. Default: all processes divided by ``tensor_parallel``.
        tensor_parallel: the number of ranks that split each layer between them.
        tensor_parallel_size: the same, by Lightning's name.
        tp_plan: module pattern to style (``"colwise"``, ``"rowwise"``, …). Default: the
            transformers model's plan.
        compile: ``torch.compile`` each block before it is sharded.
        cpu_offload: keep shards, gradients and optimizer state on the CPU.
        save_distributed_checkpoint: save a folder of shards (the default), or one file assembled on
            rank 0.
        async_save: copy the shards to the host and write them while training goes on, at most one
            checkpoint at a time. An older checkpoint is removed after the new one is complete.
        process_group_backend: as in Lightning.
        timeout: as in Lightning.
        **options: ``fully_shard``'s other keywords: ``reshard_after_forward``, ``ignored_params``,
            …

    Raises:
        PlanError: when a run starts: the mesh sizes do not multiply to the number of processes,
            ``wrap`` matches nothing, a unit would hold two dtypes, or tensor parallelism cannot
            split a layer.
    """

    gathers_fp8 = True
    plan_engine = ShardedEngine
    own_format = "sharded"

    def __init__(  # noqa: PLR0913  Lightning's keywords and this strategy's own
        self,
        *,
        wrap: Wrap = None,
        device_mesh: tuple[int, int] | None = None,
        data_parallel_size: int | str = "auto",
        tensor_parallel: int = 1,
        tensor_parallel_size: int | str = "auto",
        tp_plan: tensor_parallel.Plan | None = None,
        compile: bool = False,
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = True,
        async_save: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **options: Any,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=save_distributed_checkpoint,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._options, self._compile, self._wrap = options, compile, wrap
        self._offloads = cpu_offload or isinstance(options.get("offload_policy"), CPUOffloadPolicy)
        self._mesh: tuple[int, int] | None = device_mesh
        self._tensor_parallel = tensor_parallel if tensor_parallel_size == "auto" else int(tensor_parallel_size)
        self._shards, self._tp_plan = data_parallel_size, tp_plan
        self._sharded = self._backward_inside = False
        #: the weights that are gathered in FP8 in training. Their shards stay plain fp32 tensors:
        #: FSDP2's hooks are attributes of them, which no state dict holds
        self._in_fp8: list[_InFP8] = []
        #: True if users have code between a forward and its backward pass. It has to find
        #: shards.
        self._hooks_before_backward = False
        #: gathers weights for forward passes of hooks and callbacks
        self._between_steps: BetweenSteps | None = None
        self._saves = Saves(later=async_save, timeout=timeout)
        self.saves_folders = save_distributed_checkpoint

    # ------------------------------------------------------------------ processes

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        size = self._tensor_parallel
        return {"num_replicas": self.world_size // size, "rank": self.global_rank // size}

    def setup_environment(self) -> None:
        """Start the process group, and make the device mesh.

        Raises:
            PlanError: the mesh sizes do not multiply to the number of processes.
        """
        world = self.num_nodes * self.num_processes
        replicas, shards, size = self.degrees(world)
        if min(replicas, shards, self._tensor_parallel) < 1 or replicas * shards * size != world:
            ranks = f"device_mesh=({replicas}, {shards})" if self._mesh else f"{shards} data-parallel ranks"
            raise PlanError.of(
                f"{ranks} and tensor_parallel={self._tensor_parallel} with {world} processes",
                f"use sizes whose product is {world}, or start {max(replicas * shards * size, 1)} processes",
                "strategy",
            )
        self._setup_distributed()
        sizes = {"replicate": replicas, "shard": shards} if self._mesh else {"data_parallel": shards}
        sizes |= {"tensor_parallel": size} if size > 1 else {}
        kind = self.root_device.type
        self._device_mesh = init_device_mesh(kind, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        sharding_compat.set_timeout(self._device_mesh.get_all_groups(), self._timeout)
        set_mesh(self._user_module, self._device_mesh)

    def degrees(self, world: int) -> tuple[int, int, int]:
        """Return (replicas, shards in a replica, ranks that split a layer) for ``world`` ranks."""
        size = max(self._tensor_parallel, 1)
        shards = max(world // size, 1) if self._shards == "auto" else int(self._shards)
        replicas, shards = self._mesh or (1, shards)
        return replicas, shards, size

    @property
    def _shard_mesh(self) -> DeviceMesh:
        names = self.device_mesh.mesh_dim_names or ()
        return self.device_mesh[tuple(name for name in names if name != "tensor_parallel")]

    # ------------------------------------------------------------------ the model

    def check_plan(self, engine: StepEngine, module: nn.Module, faults: Faults) -> Layout | None:
        """Return how to shard ``module``, or ``None`` if it is sharded already.

        ``configure_model`` or an earlier run may have sharded it. ``module`` is not changed. Parts
        of it that cannot run are added to ``faults``. So are options that exclude FP8's
        ``all_gather``.
        """
        refuse_callbacks(module, "sharded weights", faults)
        ignored = self._options.get("ignored_params") or ()
        refuse_weights(module, faults, ignored)
        refuse_gradients(module, faults, ignored)
        if any(isinstance(part, FSDPModule) for part in module.modules()):
            check_users_sharding(module, engine.policy, engine.pin_map, faults)
            return None
        storage, size = engine.policy.storage_dtype, self._tensor_parallel
        blocks, inner = units(module, self._wrap, engine.pin_map, engine.stored_dtypes(), faults, together=storage)
        styles = tensor_parallel.styles(module, self._tp_plan, size, faults) if size > 1 else {}
        if engine.policy.fp8 is not None and engine.policy.fp8.all_gather:
            again = self._options.get("reshard_after_forward")
            for given, holds in (
                (f"tensor_parallel={size}", size > 1),
                ("cpu_offload=True", self._offloads),
                (f"reshard_after_forward={again!r}", type(again) is int),
                ("compile=True", self._compile),
            ):
                if holds:
                    faults.add(f"FP8(all_gather=True) with {given}", fix=f"leave out all_gather=True, or {given}")
        cannot_initialise(module, faults)
        return blocks, inner, styles

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        noted = notes_on_parameters(self._user_module)
        self.prepare_and_shard()
        self.model_to_device()
        restore_notes(self._user_module, noted)  # configure_optimizers reads them
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        self._hooks_before_backward = fitting and _has_hooks_before_backward(trainer)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting and not self._offloads:
            optimizers_to_device(self.optimizers, self.root_device)

    def prepare_and_shard(self) -> None:
        """Apply the plan to the user's module and shard it, in place and in this order.

        Every rank calls it. A module that is sharded already keeps its units.
        """
        plan, module, device = plan_of(self), self._user_module, self.root_device
        layout: Layout | None = plan.apply(module)  # casts, FP8, pins, checkpointing
        engine = self._engine

        def make_whole(part: nn.Module) -> None:  # the device holds one whole module at a time
            materialize(part, module, device, device)
            part.to(device)

        if layout is not None:
            blocks, inner, styles = layout
            with sharding_compat.hooks_kept(module):
                broadcast_from_first(module, device)
                if self._tensor_parallel > 1:
                    tensor_parallel.parallelize(module, styles, self.device_mesh["tensor_parallel"], make_whole)
                for block in blocks if self._compile else ():  # before sharding: FSDP's hooks stay eager
                    block.compile()
                how: dict[str, Any] = {"cpu_offload": self._offloads, **self._options}
                shard(module, inner, self._shard_mesh, device, plan.policy.reduce_dtype, **how)
            self._sharded = True
        # FSDP2's own param_dtype casts all weights of a unit, norms and embeddings too. It adds the
        # gradients of a weight that is used twice in half precision. Here every number is the same
        # as under autocast with fp32 weights. Autocast keeps no copy of the weights until the
        # backward pass.
        free = survey(module, engine.pin_map, plan.policy)
        names = {(id(part), key): weight.name for weight in free for _, part, key in weight.places}
        compute_dtype = to_torch(plan.policy.compute_dtype)
        halves = sharding_compat.gather_halves(module, names, compute_dtype, AutocastWeight)
        rule = cast("Any", plan.policy.fp8)
        gathers_fp8 = getattr(rule, "all_gather", False) and self._sharded
        converted = {id(one.weight): one for one in engine.converted} if gathers_fp8 else {}
        self._in_fp8 = [one for one in _InFP8.of(module) if id(one.shard) in converted]
        self._fp8_group: Any = self._shard_mesh.get_group(-1) if self._in_fp8 else None
        for one in self._in_fp8:
            one.module, one.emulate = converted[id(one.shard)], rule.emulate
        self._between_steps = BetweenSteps(module, halves, self._in_fp8, device, compute_dtype)
        self._between_steps.start()

    def teardown(self) -> None:
        """Wait for the present save, then end the run. Raises the error that ended the save.

        Units stay sharded, and gather weights as they are stored. Units of a run that the plan
        refused are not touched.
        """
        began = self.lightning_module is not None and plan_of(self).engine is not None
        between_steps, self._between_steps = self._between_steps, None
        try:
            self._saves.close()
        finally:
            super().teardown()
            if began:
                sharding_compat.gather_halves(self._user_module, {}, torch.float32, AutocastWeight)
            if between_steps is not None:
                between_steps.end_run()

    def model_to_device(self) -> None:
        if not self._offloads:
            super().model_to_device()
            return
        for buffer in self._user_module.buffers():  # parameters stay on the CPU
            buffer.data = buffer.data.to(self.root_device)

    # ------------------------------------------------------------------ steps

    def _as_forward(self, method: str, context: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step ``method`` as the forward of the root unit, and return its output.

        The step can use the root's parameters anywhere, as under DDP. ``context`` names a method of
        the plan, whose result is entered around the step.
        """
        plan, module, training = self.precision_plugin, self.lightning_module, method == "training_step"
        assert module is not None
        assert self._between_steps is not None
        manual = training and not module.automatic_optimization
        patched, fast = "forward" in module.__dict__, torch.backends.mha.get_fastpath_enabled()
        # Without the fast path, torch's attention layers call their children, whose hooks gather
        # and cast.
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            again = manual and isinstance(module, FSDPModule)
            with self._between_steps.step(), ExitStack() as stack:
                if self._in_fp8:
                    self._scale_fp8(training)
                stack.enter_context(getattr(plan, context)())
                if again:
                    stack.enter_context(self._gathered_again(module))
                output = self._forward_redirection(module, module, method, *args, **kwargs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            if not patched:  # Lightning leaves a bound forward, which a copy would call
                module.__dict__.pop("forward", None)
        # Otherwise a backward pass follows, which reshards. Code that writes to weights afterwards
        # finds the shards.
        no_backward = not training or manual or output is None
        if isinstance(module, FSDPModule) and (no_backward or self._hooks_before_backward):
            module.reshard()
        return output

    @torch.no_grad()
    def _scale_fp8(self, training: bool) -> None:
        """Set the scales of the FP8 weights, and how they are gathered in the next step.

        A collective if they are gathered in FP8. Weights do not change within a step, so the scales
        hold for all of it.
        """
        in_fp8 = training or cast("Any", plan_of(self).policy.fp8).evaluate == "fp8"
        if in_fp8:
            amax = torch.stack(list(norms([weight.local for weight in self._in_fp8], torch.inf)))
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._fp8_group)
            for weight, scale in zip(self._in_fp8, torchao.scales(amax).unbind(), strict=True):
                weight.scale = scale
        for weight in self._in_fp8:  # a layer that fell back to bf16 is no longer converted
            weight.use(in_fp8 and is_converted(weight.module))

    training_step: Any = partialmethod(_as_forward, "training_step", "train_step_context")
    validation_step: Any = partialmethod(_as_forward, "validation_step", "val_step_context")
    test_step: Any = partialmethod(_as_forward, "test_step", "test_step_context")
    predict_step: Any = partialmethod(_as_forward, "predict_step", "predict_step_context")

    @contextmanager
    def _gathered_again(self, root: Any) -> Generator[None, None, None]:
        """Within the context, modules that hold the root's weights unshard them when called.

        It is for a step that runs its backward pass itself. ``fully_shard`` gathers the root once,
        for its forward, and here that is the whole step. The backward pass in the step reshards the
        root.
        """
        units = [one for one in root.modules() if isinstance(one, FSDPModule) and one is not root]
        in_units = {part for unit in units for part in cast("Any", unit).modules()}
        with ExitStack() as stack:
            for part in root.modules():
                if part is not root and part not in in_units and [*part.parameters(recurse=False)]:
                    # unshard() does nothing if the root is gathered
                    handle = part.register_forward_pre_hook(lambda *_: root.unshard(), prepend=True)
                    stack.callback(handle.remove)
            with patched(self, _backward_inside=True):
                yield

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Register hooks on the loss, by which its backward pass gathers weights as steps do.

        If the step runs the backward pass itself, the root is gathered too.
        """
        if self._between_steps is not None and closure_loss.requires_grad:
            # in a hook: a forward pass in on_before_backward, which comes first, may change how
            # weights are gathered
            gather_as_in_steps = self._between_steps.gather_as_in_steps
            closure_loss.register_hook(lambda _gradient: gather_as_in_steps())
        if self._backward_inside and closure_loss.requires_grad:
            sharding_compat.before_backward_from(closure_loss, self._user_module)

    on_validation_start = on_test_start = on_predict_start = on_train_end = PlanStrategy.share_buffers

    # ------------------------------------------------------------------ checkpoints

    def _save_folder(self, checkpoint: dict[str, Any], path: str, storage_options: Any) -> None:
        """Save a folder of shards, in a thread if ``async_save`` in a running fit. A collective.

        Raises:
            TypeError: ``storage_options`` is given, which no CheckpointIO would use.
        """
        if storage_options is not None:
            raise TypeError("storage_options= with a folder of shards, which no CheckpointIO writes: leave it out")
        state = self._user_module.trainer.state
        # Outside of a running fit nothing would wait for the thread.
        later = state.fn == TrainerFn.FITTING and state.status == TrainerStatus.RUNNING
        self._saves.save(checkpoint, path, first=self.is_global_zero, first_of_node=self.local_rank == 0, fitting=later)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Wait for the present save, then return the checkpoint as the base class does."""
        self.finish_saving()
        return super().load_checkpoint(checkpoint_path, weights_only)

    def finish_saving(self) -> None:
        """Wait until the present save is complete on every rank, and older checkpoints are removed.

        A collective: every rank calls it. Raises the error that ended the save or a removal.
        """
        self._saves.wait()
        self.barrier()

    def open_folder(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        index = index_of(path)
        return {
            **saving.load_extra(path, weights_only=weights_only),
            "state_dict": LazyWeights(index.weights, partial(read_weights, path)),
            "optimizer_states": LazyStates(index.optimizers, partial(read_optimizer_states, path)),
        }

    def load_folder_weights(self, weights: LazyWeights, *, strict: bool) -> None:
        """Load this rank's shards of a folder's weights.

        If the folder has names that the module lacks, each rank reads all weights, and
        ``load_state_dict`` decides.
        """
        assert self.model is not None
        assert self._folder is not None
        if weights.keys() <= set(map(plain_name, self.model.state_dict())):
            saving.load_weights(self._folder, self.model, weights.keys(), strict=strict)
        else:  # load_state_dict renames weights of an earlier version of a module, or refuses them
            self.load_whole_weights(dict(weights), strict=strict)

    def load_folder_states(self, states: LazyStates) -> None:
        assert self._folder is not None
        saving.load_states(self._folder, cast("nn.Module", self.model), self.optimizers)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint. During an asynchronous save, wait for it in the thread.

        If that save fails, the checkpoint stays.
        """
        self._saves.remove(partial(super().remove_checkpoint, filepath))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.share_buffers()
        return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of ``optimizer`` for a checkpoint. A collective.

        For a folder of shards it is Lightning's. For a single file, rank 0 returns whole tensors on
        the CPU, and other ranks return an empty dictionary. Parameters are numbered by the
        optimizer's own groups, as any optimizer loads them.
        """
        if self.saves_folders:
            return super().optimizer_state(optimizer)
        keep = self.global_rank == 0
        content = by_parameter(
            optimizer.state_dict(),
            optimizer,
            lambda _, values: {key: whole_on_cpu(value, keep=keep) for key, value in values.items()},
        )
        return content if keep else {}

    load_whole_weights = PlanStrategy.load_sharded_weights
    load_whole_states = PlanStrategy.load_sharded_states

    def reads(self, path: Any) -> bool:
        """True if FSDP2 wrote ``path``, and it has a state of every parameter in an optimizer."""
        if not super().reads(path):
            return False
        index = index_of(str(path))
        names = {id(parameter): name for name, parameter in self._user_module.named_parameters()}
        wanted = {
            f"optimizer_{number}.state.{names[id(parameter)]}"
            for number, optimizer in enumerate(self.optimizers)
            for parameter in parameters_of(optimizer)
        }
        return bool(index.weights) and wanted <= {entry.rpartition(".")[0] for entry in index.entries}


def _has_hooks_before_backward(trainer: Any) -> bool:
    """True if the module or a callback overrides ``on_before_zero_grad`` or ``on_before_backward``.

    Callbacks of this package do not count.
    """
    users = [callback for callback in trainer.callbacks if not type(callback).__module__.startswith("lightning_mp.")]
    return any(
        is_overridden(name, trainer.lightning_module) or any(is_overridden(name, one, Callback) for one in users)
        for name in ("on_before_zero_grad", "on_before_backward")
    )


class PlanHSDPStrategy(PlanFSDP2Strategy):
    """FSDP2 with shards within a node and replicas across nodes.

    ``device_mesh=(replicas, shards)`` replaces these sizes.
    """

    def setup_environment(self) -> None:
        if self._mesh is None:
            self._mesh = (self.num_nodes, max(self.num_processes // max(self._tensor_parallel, 1), 1))
        super().setup_environment()
