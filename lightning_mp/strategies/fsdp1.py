"""Lightning's ``FSDPStrategy`` under a plan without pins.

FSDP1 is deprecated, and FSDP2 can do more.
"""

from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim import Optimizer

from lightning_mp.checkpoints.formats import rekeyed
from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.lightning import (
    FSDPStrategy,
    Trainer,
    TrainerFn,
    move_torchmetrics_to_device,
    optimizers_to_device,
)
from lightning_mp.compat.torch_sharding import FSDP1_ROOT
from lightning_mp.errors import Faults
from lightning_mp.fsdp2.engine import ShardedEngine
from lightning_mp.fsdp2.units import Wrap, broadcast_from_first, units
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics.dtypes import to_torch
from lightning_mp.numerics.grads import parameters_of
from lightning_mp.plan.engine import StepEngine
from lightning_mp.strategies.base import PlanStrategy, plan_of, refuse_callbacks, refuse_gradients, refuse_weights

_INSTEAD = "use strategy='mp_fsdp2'"
#: refused keywords, and the fix for each
_REFUSED = {
    **dict.fromkeys(("ignored_states", "ignored_modules", "ignored_parameters", "param_init_fn"), _INSTEAD),
    "auto_wrap_policy": "write wrap=[TheBlock], with the same classes",
}


class PlanFSDP1Strategy(PlanStrategy, FSDPStrategy):
    """``FullyShardedDataParallel`` under a plan without pins, on CUDA and on the CPU (gloo).

    Args:
        wrap: module classes, names of classes or patterns that become FSDP units. Default:
            transformers' ``_no_split_modules``, else modules of 100M parameters.
        **host: other keywords of ``FSDPStrategy`` and of ``FullyShardedDataParallel``. A checkpoint
            is one file.

    Raises:
        PlanError: at construction, for a keyword that cannot be used, and for replicas of shards.
            When a run starts, for pins, manual optimization, parameters that one flat tensor cannot
            hold, and another fit of a wrapped module.
    """

    plan_engine = ShardedEngine
    own_format = None

    def __init__(self, *, wrap: Wrap = None, **host: Any) -> None:
        with Faults("strategy") as faults:
            for name, fix in _REFUSED.items():
                if host.pop(name, None) is not None:
                    faults.add(f"{name}= with FSDP1", fix=fix)
            if not host.pop("use_orig_params", True):
                faults.add("use_orig_params=False, where optimizers take the module's own parameters", fix="remove it")
            if host.get("device_mesh") is not None or "HYBRID" in str(host.get("sharding_strategy")):
                faults.add("replicas of FSDP1's shards", fix="use strategy='mp_hsdp'")
            if host.pop("state_dict_type", "full") != "full":
                faults.add("state_dict_type='sharded' with FSDP1", fix=_INSTEAD)
        super().__init__(**host)
        self._wrap = wrap

    # ------------------------------------------------------------------ the model

    def check_plan(self, engine: StepEngine, module: Any, faults: Faults) -> Any:
        """Return FSDP's wrapping policy, or ``None`` if ``module`` is wrapped already.

        Change nothing. Add a fault for anything that FSDP1 cannot run.
        """
        refuse_callbacks(module, "FSDP1's flat parameters", faults)
        fitting, stored = module.trainer.state.fn == TrainerFn.FITTING, to_torch(engine.policy.storage_dtype)
        if engine.policy.pins:
            faults.add("pins with FSDP1, whose units have one dtype", fix=_INSTEAD)
        if not module.automatic_optimization and fitting:
            # training_step is the root's forward, and FSDP1 cannot run a backward pass within it
            faults.add("automatic_optimization=False under FSDP1", fix="use strategy='mp_fsdp2' or 'mp_ddp'")
        if FSDP1_ROOT in vars(module):
            if fitting or any(parameter.dtype != stored for parameter in module.parameters()):
                given = "another fit, or plan, of a module that FSDP1 wrapped"
                faults.add(given, fix=f"make a new module, or {_INSTEAD}")
            return None
        if any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules()):
            faults.add(
                "a module that is wrapped in FullyShardedDataParallel already",
                fix="remove it from configure_model, or call torch.distributed.fsdp.wrap.wrap() there, which waits",
            )
            return None
        refuse_weights(module, faults)
        refuse_gradients(module, faults)
        dtype_of = engine.stored_dtypes()
        for name, parameter in module.named_parameters():
            if parameter.is_meta:
                faults.add(f"{name!r} on the meta device with FSDP1", fix=_INSTEAD)
            elif not parameter.is_floating_point() or dtype_of(parameter) != stored:
                dtype = str(parameter.dtype).removeprefix("torch.")
                faults.add(f"parameter {name!r} in {dtype} with FSDP1, whose units have one dtype", fix=_INSTEAD)
        _, inner = units(module, self._wrap, engine.pin_map, dtype_of, faults)
        return CustomPolicy(set(inner).__contains__)

    def setup(self, trainer: Trainer) -> None:
        """Apply the plan, make the optimizers, then wrap the module. Every rank calls it.

        Optimizers are made on whole parameters, because wrapping keeps the parameter objects.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        plan, module, fitting = plan_of(self), cast("Any", self.model), trainer.state.fn == TrainerFn.FITTING
        with _unwrapped(module) if FSDP1_ROOT in vars(module) else nullcontext():
            policy = plan.apply(module)
        if fitting:
            self.setup_optimizers(trainer)
        if FSDP1_ROOT not in vars(module):
            broadcast_from_first(module, self.root_device)
            # on the CPU there is nothing to offload, and torch would pin memory for it
            on_cpu = self.root_device.type == "cpu"
            vars(module)[FSDP1_ROOT] = FullyShardedDataParallel(
                module,
                cpu_offload=CPUOffload(offload_params=False) if on_cpu else self.cpu_offload,
                mixed_precision=MixedPrecision(  # no param_dtype, as in fsdp2.units.shard
                    reduce_dtype=to_torch(plan.policy.reduce_dtype),
                    cast_forward_inputs=False,
                    cast_root_forward_inputs=False,
                    **sharding_compat.LEAVE_ALL_MODULES,
                ),
                sharding_strategy=self.sharding_strategy,
                device_id=self.root_device,
                auto_wrap_policy=policy,
                **self.kwargs,
            )
            move_torchmetrics_to_device(vars(module)[FSDP1_ROOT], self.root_device)
        self.model = vars(module)[FSDP1_ROOT]
        self.barrier()
        self.setup_precision_plugin()
        if fitting and not self.cpu_offload.offload_params:
            optimizers_to_device(self.optimizers, self.root_device)

    #: ``wrap()`` in ``configure_model`` does nothing: flat parameters could no longer be cast
    model_sharded_context: Any = nullcontext
    on_validation_start = on_test_start = on_predict_start = on_train_end = PlanStrategy.share_buffers

    # ------------------------------------------------------------------ checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.share_buffers()
        with self._whole_states() as root:
            return root.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the whole state of ``optimizer`` on rank 0. A collective.

        It is numbered by the optimizer's own groups, as any optimizer loads it. Other ranks return
        FSDP's empty result.
        """
        with self._whole_states() as root:
            state = FullyShardedDataParallel.optim_state_dict(root, optimizer)
        return rekeyed(state) if self.global_rank == 0 else state

    @contextmanager
    def _whole_states(self, *, loading: bool = False) -> Generator[FullyShardedDataParallel, None, None]:
        """Yield the root, whose state dicts are whole within the context.

        Unless ``loading``, only rank 0 has them. On the CPU nothing is offloaded to the CPU,
        because torch crashes on it.
        """
        root = cast("FullyShardedDataParallel", self.model)
        how = {"offload_to_cpu": self.root_device.type != "cpu", "rank0_only": not loading}
        configs = FullStateDictConfig(**how), FullOptimStateDictConfig(**how)
        with FullyShardedDataParallel.state_dict_type(root, StateDictType.FULL_STATE_DICT, *configs):
            yield root

    def load_whole_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Load this rank's shards of whole weights. Every rank calls it."""
        with self._whole_states(loading=True) as root:
            root.load_state_dict(weights, strict=strict)

    def load_whole_states(self, states: list[Any]) -> None:
        """Load this rank's shards of whole optimizer states. Every rank calls it.

        Lightning reads the numbers in a state as positions in the *model*. They differ if there are
        several groups.
        """
        with self._whole_states(loading=True) as root:
            names = {id(parameter): plain_name(name) for name, parameter in root.named_parameters()}
            for optimizer, state in zip(self.optimizers, states, strict=True):
                named = rekeyed(state, [names[id(parameter)] for parameter in parameters_of(optimizer)])
                optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(root, optimizer, named))


@contextmanager
def _unwrapped(module: nn.Module) -> Generator[None, None, None]:
    """Take the FSDP wrappers of an earlier run out of the tree within the context.

    Module names and classes are then the user's.
    """
    wrapped = FullyShardedDataParallel
    parents = [parent for parent in module.modules() if not isinstance(parent, wrapped)]
    children = [(parent, *named) for parent in parents for named in parent.named_children()]
    taken = [(parent, name, child) for parent, name, child in children if isinstance(child, wrapped)]
    for parent, name, child in taken:
        setattr(parent, name, child.module)
    try:
        yield
    finally:
        for parent, name, child in taken:
            setattr(parent, name, child)
