"""FSDP1 for any LightningModule: the plan is applied, then the model is cut into units and wrapped."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.optim import Optimizer

from lightning_mp.checkpoints.formats import SHARDED_EXTRA, Kind, is_remote_path, without_file_protocol
from lightning_mp.checkpoints.names import plain_names
from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.lightning import (
    FSDP1,
    FSDPStrategy,
    LightningModule,
    LightningOptimizer,
    Trainer,
    TrainerFn,
    move_torchmetrics_to_device,
    optimizers_to_device,
)
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.sharded import ShardedEngine
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.modules.patterns import named_submodules
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.strategies import unfit_callbacks
from lightning_mp.strategies.checkpoint_io import PortableCheckpoints, set_learning_rates
from lightning_mp.strategies.common import RunsPlan, plan_of
from lightning_mp.strategies.fail_together import FailTogether
from lightning_mp.strategies.fsdp1 import wrapping as flat
from lightning_mp.strategies.layer_sync import PlanSyncsBatchNorm
from lightning_mp.strategies.meta_device import cannot_initialise
from lightning_mp.strategies.shard_units import Units, Wrap, units
from lightning_mp.strategies.sharding import broadcast_from_first


class PlanFSDP1Strategy(RunsPlan, FailTogether, PlanSyncsBatchNorm, PortableCheckpoints, FSDPStrategy):
    """``FullyShardedDataParallel`` under a plan, on CUDA and on the CPU (gloo).

    Args:
        wrap: module classes, names of classes or patterns that become FSDP units; by default transformers'
            ``_no_split_modules``, else modules of 100M parameters. Pinned modules are units in any case.
        auto_wrap_policy: the same decided by a set of classes or a policy of ``torch.distributed.fsdp.wrap``.
        sharding_strategy: as in Lightning.
        device_mesh: ``(replicas, shards)`` or a ``DeviceMesh``, for ``HYBRID_SHARD``.
        state_dict_type: ``"full"`` is one file that any strategy resumes from, ``"sharded"`` a folder.
        mixed_precision: refused: the plan decides.
        activation_checkpointing: refused: the plan decides.
        activation_checkpointing_policy: refused: the plan decides.
        use_orig_params: must stay ``True``.
        **host: ``FSDPStrategy``'s other keywords, and ``FullyShardedDataParallel``'s.

    Raises:
        PlanError: at construction: keywords that contradict a plan; at start: a mesh that the number of processes does
            not fill, ``wrap`` that matches nothing, two dtypes in one unit, trainable parameters that FSDP is to
            ignore, manual optimization, a module that is wrapped in FSDP already.
    """

    plan_engine = ShardedEngine
    private_names = (FSDP1, sharding_compat.FSDP1)
    own_formats: frozenset[Kind] = frozenset({"sharded"})

    def __init__(
        self,
        *,
        wrap: Wrap = None,
        auto_wrap_policy: Any = None,
        sharding_strategy: Any = "FULL_SHARD",
        device_mesh: tuple[int, int] | DeviceMesh | None = None,
        state_dict_type: Literal["full", "sharded"] = "full",
        mixed_precision: MixedPrecision | None = None,
        activation_checkpointing: Any = None,
        activation_checkpointing_policy: Any = None,
        use_orig_params: bool = True,
        **host: Any,
    ) -> None:
        with Faults("strategy") as faults:
            _refuse_precision(mixed_precision, faults)
            _refuse_checkpointing(activation_checkpointing or activation_checkpointing_policy, faults)
            _refuse_wrapping(wrap, auto_wrap_policy, use_orig_params, faults)
            if state_dict_type not in ("full", "sharded"):
                faults.add(f"state_dict_type={state_dict_type!r}", "'full' or 'sharded'", "write one of the two")
        super().__init__(
            # HYBRID_SHARD is refused by Lightning without one; what is wrapped is decided in check_plan
            auto_wrap_policy=ModuleWrapPolicy(()) if auto_wrap_policy is None else auto_wrap_policy,
            sharding_strategy=sharding_strategy,
            device_mesh=cast("Any", tuple(device_mesh) if isinstance(device_mesh, list) else device_mesh),  # as in YAML
            state_dict_type=state_dict_type,
            **host,
        )
        policy = self.kwargs.pop("auto_wrap_policy")
        self._policy = None if auto_wrap_policy is None else policy
        self._wrap = wrap

    # ------------------------------------------------------------------ processes

    def setup_environment(self) -> None:
        """Start the process group and lay the mesh.

        Raises:
            PlanError: the mesh has not as many places as there are processes.
        """
        mesh = self.kwargs.get("device_mesh")
        if isinstance(mesh, tuple):
            _check_mesh(cast("tuple[int, ...]", mesh), self.num_nodes * self.num_processes)
            del self.kwargs["device_mesh"]  # Lightning would lay it on CUDA, whatever the device
        super().setup_environment()
        if isinstance(mesh, tuple):
            shape = cast("tuple[int, ...]", mesh)
            names = ("replicate", "shard")
            self.kwargs["device_mesh"] = init_device_mesh(self.root_device.type, shape, mesh_dim_names=names)

    # ------------------------------------------------------------------ the model

    @property
    def mixed_precision_config(self) -> MixedPrecision:
        """Parameters are gathered as they are stored, gradients reduced in ``reduce_dtype``, all else left alone.

        Autocast and the pins decide what is computed in: ``param_dtype`` would change what norms and embeddings run
        in, and a step would no longer be that of DDP.
        """
        return MixedPrecision(
            reduce_dtype=to_torch(plan_of(self).policy.reduce_dtype),
            cast_forward_inputs=False,
            cast_root_forward_inputs=False,
            **sharding_compat.leave_all_modules(),
        )

    def check_plan(self, engine: StepEngine, module: nn.Module, faults: Faults) -> Units | None:
        """Cut the model into units, ``None`` where a run before did; notes what cannot be, and changes nothing."""
        self._check_manual(faults)
        self.check_remote_folders(faults)
        unfit_callbacks.refuse(module, faults, (*unfit_callbacks.AVERAGES, *unfit_callbacks.PRUNING), "sharded weights")
        stored = engine.stored_dtypes()
        root = flat.root_of(module)
        if root is not None:
            flat.check_again(root, module, engine.policy, self.sharding_strategy, stored, faults)
            return None
        if any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules()):
            faults.add(
                "a module that is wrapped in FullyShardedDataParallel already",
                "modules that are wrapped after the plan is applied",
                "remove it from configure_model, or call torch.distributed.fsdp.wrap.wrap() there, which waits",
            )
            return None
        cut = units(module, self._wrapped_names(module, faults), engine.pin_map, stored, faults)
        left_out = flat.ignored(module, self.kwargs, faults)
        unfit_callbacks.refuse_weights(module, (p for p in module.parameters() if id(p) in left_out), faults)
        flat.check_flat(module, cut, stored, left_out, faults)
        if "param_init_fn" not in self.kwargs:
            cannot_initialise(module, faults, "pass param_init_fn=, ")
        return cut

    def _check_manual(self, faults: Faults) -> None:
        """A backward pass inside ``training_step`` is one inside the root's forward, which FSDP1 does not survive."""
        module = self.lightning_module
        if module is None or module.automatic_optimization or module.trainer.state.fn != TrainerFn.FITTING:
            return
        faults.add(
            "automatic_optimization=False under FSDP1",
            "automatic optimization: FSDP1 cannot run backward before training_step has returned",
            "use strategy='mp_fsdp2' or 'mp_ddp'",
        )

    def _wrapped_names(self, module: nn.Module, faults: Faults) -> Wrap:
        if self._policy is None:
            return self._wrap
        chosen = set(map(id, flat.chosen_by(self._policy, module, faults)))
        return [name for name, submodule in named_submodules(module) if id(submodule) in chosen]

    def setup(self, trainer: Trainer) -> None:
        """Apply the plan, wrap, then make the optimizers on what is left here."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        plan, module = plan_of(self), cast("LightningModule", self.model)
        fitting, root = trainer.state.fn == TrainerFn.FITTING, flat.root_of(module)
        if fitting and self._layer_sync and root is None:
            module = cast("LightningModule", self._layer_sync.apply(module))
        with nullcontext() if root is None else flat.unwrapped(module):
            cut: Units | None = plan.apply(module)
        if cut is not None:
            root = self._wrap_units(module, cut)
        assert root is not None
        self.model = root
        self.barrier()
        if fitting:
            with flat.full_shapes(root) as fit_state, flat.unwrapped(module):
                self.setup_optimizers(trainer)
                fit_state(self.optimizers)
        self.setup_precision_plugin()
        if fitting and not self.cpu_offload.offload_params:
            optimizers_to_device(self.optimizers, self.root_device)

    def _wrap_units(self, model: nn.Module, cut: Units) -> FullyShardedDataParallel:
        broadcast_from_first(model, self.root_device)
        chosen, on_cpu = set(map(id, cut.inner)), self.root_device.type == "cpu"
        options: dict[str, Any] = {"param_init_fn": self._initialiser(model), **self.kwargs}
        root = FullyShardedDataParallel(
            model,
            # there is nowhere to offload to from the CPU, and torch would pin memory for it
            cpu_offload=CPUOffload(offload_params=False) if on_cpu else self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),
            **options,
        )
        _check_synchronised(root, self.sharding_strategy)
        flat.keep_root(model, root)
        move_torchmetrics_to_device(root, self.root_device)
        return root

    def _initialiser(self, model: nn.Module) -> Callable[[nn.Module], None] | None:
        if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            return None
        return partial(flat.materialise, root=model, device=self.root_device)

    @contextmanager
    def model_sharded_context(self) -> Generator[None, None, None]:
        """``wrap()`` in ``configure_model`` does nothing: flat parameters could no longer be cast or pinned."""
        yield

    # ------------------------------------------------------------------ checkpoints

    @property
    def saves_folders(self) -> bool:
        return self._state_dict_type == "sharded"

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Save as Lightning does; rank 0 first removes a checkpoint of the other format from the path."""
        path = without_file_protocol(self.broadcast(filepath))
        if is_remote_path(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        path = Path(path)
        if self.is_global_zero and self._state_dict_type == "sharded" and path.is_file():
            path.unlink()
        elif self.is_global_zero and self._state_dict_type == "full" and (path / SHARDED_EXTRA).is_file():
            shutil.rmtree(path)
        self.barrier()  # Lightning has every rank remove it, and the slower ones fail
        super().save_checkpoint(checkpoint, path, storage_options=storage_options)

    def stored_dtypes(self) -> dict[str, str]:
        return plain_names(super().stored_dtypes())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        with self._state(self._state_dict_type):
            return self._wrapped.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        with self._state(self._state_dict_type):
            state = FullyShardedDataParallel.optim_state_dict(self._wrapped, optimizer)
        if self._state_dict_type == "sharded" or self.global_rank != 0:
            return state
        return flat.by_position(state)

    @property
    def _wrapped(self) -> FullyShardedDataParallel:
        assert isinstance(self.model, FullyShardedDataParallel)
        return self.model

    def _state(self, kind: str, *, loading: bool = False) -> AbstractContextManager[Any]:
        """How state dicts come out; the memory of a CPU cannot be offloaded to the CPU: torch crashes on it."""
        offload = self.root_device.type != "cpu"
        if kind == "sharded":
            return FullyShardedDataParallel.state_dict_type(
                self._wrapped,
                StateDictType.SHARDED_STATE_DICT,
                ShardedStateDictConfig(offload_to_cpu=offload),
                ShardedOptimStateDictConfig(offload_to_cpu=offload),
            )
        return FullyShardedDataParallel.state_dict_type(
            self._wrapped,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=not loading),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=not loading),
        )

    def reads(self, path: Any) -> bool:
        """Whether it is a folder of FSDP1's shards that can be read shard by shard."""
        return super().reads(path) and flat.loads_by_shard(Path(path), len(self.optimizers))

    def load_full(self, checkpoint: dict[str, Any]) -> None:
        """Shard whole weights, and while fitting whole optimizer states, into what this rank holds."""
        module = self.lightning_module
        assert module is not None
        with self._state("full", loading=True):
            self._wrapped.load_state_dict(checkpoint.pop("state_dict"), strict=module.strict_loading)
            if module.trainer.state.fn != TrainerFn.FITTING:
                return
            states = checkpoint.get("optimizer_states") or ()
            if not states:
                set_learning_rates(self.optimizers, checkpoint)
                return
            _check_count(states, self.optimizers)
            for optimizer, state in zip(self.optimizers, states, strict=True):
                named = flat.by_name(state, optimizer, self._wrapped)
                optimizer.load_state_dict(
                    FullyShardedDataParallel.optim_state_dict_to_load(self._wrapped, optimizer, named)
                )


# ------------------------------------------------------------------ refusals


def _refuse_precision(given: MixedPrecision | None, faults: Faults) -> None:
    if given is not None:
        faults.add(
            f"mixed_precision={given}",
            "mixed_precision=None, since the plan says what is stored, computed and reduced in which dtype",
            f"write MixedPrecisionPlan(..., reduce_dtype={flat.short(given.reduce_dtype)!r}) and pins={{...}} instead",
        )


def _refuse_checkpointing(given: Any, faults: Faults) -> None:
    if given is not None:
        faults.add(
            f"activation checkpointing by the strategy ({given!r})",
            "the plan's own, which is applied before the model is wrapped",
            "write MixedPrecisionPlan(..., checkpointing='TheBlock') instead",
        )


def _refuse_wrapping(wrap: Wrap, policy: Any, use_orig_params: bool, faults: Faults) -> None:
    if wrap is not None and policy is not None:
        faults.add(f"wrap={wrap!r} and auto_wrap_policy={policy!r}", "one of the two", "remove auto_wrap_policy=")
    if not use_orig_params:
        faults.add(
            "use_orig_params=False",
            "use_orig_params=True: optimizers see the module's own parameters, as under DDP",
            "remove the keyword",
        )


def _check_mesh(shape: tuple[int, ...], world: int) -> None:
    if len(shape) != 2 or min(shape) < 1 or shape[0] * shape[1] != world:
        fault = Fault(
            f"device_mesh={shape} with {world} processes",
            "(replicas, shards) whose product is the number of processes (devices x num_nodes)",
            f"use sizes whose product is {world}",
        )
        raise PlanError([fault], "strategy")
    if shape[1] == 1 < world:
        raise _one_shard(f"device_mesh={shape}")


def _check_synchronised(root: FullyShardedDataParallel, wanted: Any) -> None:
    """With one process a shard group torch makes HYBRID_SHARD into NO_SHARD: replicas are not reduced."""
    if root.sharding_strategy is not wanted and dist.get_world_size() > 1:
        raise _one_shard(f"sharding_strategy={wanted.name} over groups of one process")


def _one_shard(given: str) -> PlanError:
    fault = Fault(
        given,
        "two processes or more in each shard group: with one, torch's FSDP leaves the replicas' gradients unsummed",
        "write sharding_strategy='NO_SHARD' without a mesh, or use strategy='mp_ddp'",
    )
    return PlanError([fault], "strategy")


def _check_count(states: Iterable[Any], optimizers: Iterable[Any]) -> None:
    saved, here = len(list(states)), len(list(optimizers))
    if saved != here:
        fault = Fault(
            f"a checkpoint with {saved} optimizer states for {here} optimizers",
            "as many optimizers as were saved",
            "configure the optimizers of the saved run, or take 'optimizer_states' out of the checkpoint",
        )
        raise PlanError([fault], "checkpoint")
