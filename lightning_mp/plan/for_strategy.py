"""The engine for a Lightning strategy, and checks of a plan against a strategy and a device."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.lightning import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    TorchSyncBatchNorm,
    ddp_hooks,
    layer_sync_of,
    mesh_of,
    rank_zero_info,
)
from lightning_mp.compat.torchao import emulates
from lightning_mp.errors import Faults
from lightning_mp.fsdp2.engine import ShardedEngine
from lightning_mp.modules import sync_batchnorm
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.dtypes import TORCH_DTYPES, set_tf32, tf32_refusal, to_torch
from lightning_mp.plan.engine import EagerEngine, StepEngine
from lightning_mp.policy import PrecisionPolicy, hardware

_INSTEAD = "use strategy='mp_fsdp2' without configure_model, which shards after the plan is applied"


def required_hosts(strategy: Strategy | None) -> list[str]:
    """Return the hosts, and parts of hosts, that a run on ``strategy`` needs.

    They are arguments for ``require_versions``: ``"torch"``, ``"torch:ddp"``.
    """
    needs = ["torch", "lightning"]
    if isinstance(strategy, DeepSpeedStrategy):
        needs.append("deepspeed")
    elif isinstance(strategy, (FSDPStrategy, ModelParallelStrategy)):
        needs.append("torch:sharding")
    elif isinstance(strategy, DDPStrategy):
        needs.append("torch:ddp")
    if "transformers" in sys.modules:  # otherwise the model is not one of transformers
        needs.append("transformers")
    return needs


def resolved(policy: PrecisionPolicy, device: hardware.Device, module: nn.Module) -> PrecisionPolicy:
    """Return ``policy`` with the choice of ``auto`` for ``module`` on ``device``. Log the reason.

    Its own TF32 setting is kept. Its loss scale is kept only if the choice is an fp16 mode.
    """
    choice = hardware.choose(device, sum(parameter.numel() for parameter in module.parameters()))
    rank_zero_info(f"precision 'auto' is {choice.precision!r}: {choice.reason}")
    return replace(
        policy,
        precision=choice.precision,
        tf32=policy.tf32 or choice.tf32,
        loss_scaling=policy.loss_scaling if choice.precision.startswith("16") else None,
    )


def check_device(policy: PrecisionPolicy, device: hardware.Device, faults: Faults) -> None:
    """Add a fault if ``device`` cannot run the policy's precision or its TF32 setting."""
    emulate = policy.fp8 is not None and policy.fp8.anywhere
    if (refused := hardware.refusal(device, policy.precision, emulate=emulate)) is not None:
        problem, allowed, fix = refused
        faults.add(problem, allowed=allowed, fix=fix)
    if policy.tf32 is not None and device.tf32 and (unsettable := tf32_refusal()) is not None:
        faults.add(unsettable[0], fix=unsettable[1])


def switch_tf32(policy: PrecisionPolicy, device: hardware.Device) -> Callable[[], None] | None:
    """Set TF32 as the policy says, and return a function that restores the setting.

    ``None`` and no change if the policy leaves TF32 alone, or if the device has no TF32. The second
    case is logged. It is also logged if FP8 products are emulated, and therefore slow, on the
    device.
    """
    if policy.fp8 is not None and (device.type != "cuda" or emulates(policy.fp8.recipe, policy.fp8.emulate)):
        needs = ": MXFP8 needs compute capability 10.0 (not 12.0), CUDA 12.8 and torchao's kernels"
        needs = needs if policy.fp8.blocks and not policy.fp8.emulate else ""
        rank_zero_info(f"fp8 on {device.name} is for checking, not for speed: it is slower than bf16 there{needs}")
    if policy.tf32 is None:
        return None
    if device.tf32:
        return set_tf32(policy.tf32)
    rank_zero_info(f"tf32={policy.tf32!r} changes nothing on {device.name}: it has no TF32")
    return None


def engine_of(strategy: Strategy | None) -> type[StepEngine]:
    """Return the class of engine for ``strategy``.

    A strategy of this package names it in ``plan_engine``. It is ShardedEngine for Lightning's
    ModelParallelStrategy, and EagerEngine for every other strategy and for none.
    """
    stock = ShardedEngine if isinstance(strategy, ModelParallelStrategy) else EagerEngine
    return getattr(strategy, "plan_engine", stock)


def completed(strategy: Strategy | None, policy: PrecisionPolicy) -> PrecisionPolicy:
    """Return ``policy``, completed from the strategy's own config if it has one (DeepSpeed's JSON).

    A loss scale that the JSON adds is logged. Other strategies return ``policy`` unchanged.
    """
    whole: PrecisionPolicy = getattr(strategy, "completed", lambda given: given)(policy)
    if whole != policy:
        rank_zero_info(f"DeepSpeed config: loss_scaling={whole.loss_scaling!r} is the JSON's, the plan has none")
    return whole


def check(strategy: Strategy, engine: StepEngine, module: nn.Module, faults: Faults) -> Any:
    """Add a fault if the plan cannot run on ``strategy``. The fix says which ``mp_*`` can.

    Return the value of the strategy's ``check_plan``, or ``None`` without such a method.
    """
    policy = engine.policy
    shards = isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy))
    if policy.fp8 is not None and policy.fp8.all_gather and shards and not hasattr(strategy, "gathers_fp8"):
        given = f"FP8(all_gather=True) with {type(strategy).__name__}, which gathers weights as they are stored"
        faults.add(given, fix="leave out all_gather=True, or use strategy='mp_fsdp2'")
    own, instead = getattr(strategy, "check_plan", None), None
    if own is not None:
        return own(engine, module, faults)
    if isinstance(strategy, DeepSpeedStrategy):  # a DDPStrategy by inheritance only
        zero = cast("Any", strategy.config).get("zero_optimization", {})
        offload = "_offload" if {"offload_optimizer", "offload_param"} & set(zero) else ""
        instead = f"mp_deepspeed_zero{zero.get('stage') or 1}{offload}"
    elif isinstance(strategy, FSDPStrategy):
        instead = "mp_fsdp1"
    elif isinstance(strategy, ModelParallelStrategy):
        check_users_sharding(module, policy, engine.pin_map, faults)
    elif isinstance(strategy, DDPStrategy):
        _check_hook(strategy, policy, faults)
    elif not isinstance(strategy, SingleDeviceStrategy):
        instead = "mp_ddp"
    if instead is not None:
        faults.add(f"strategy {type(strategy).__name__}", fix=f"use Trainer(strategy={instead!r})")
    return None


def synced(strategy: Strategy, module: nn.Module, faults: Faults) -> list[nn.Module]:
    """Return the batch norms that ``sync_batchnorm=True`` synchronizes.

    The list is empty without ``sync_batchnorm``, and with a LayerSync class of the user's own. A
    fault is added if they cannot be synchronized.
    """
    layer_sync = layer_sync_of(strategy)
    if type(layer_sync) is not TorchSyncBatchNorm:
        return []
    mesh = mesh_of(strategy) if isinstance(strategy, ModelParallelStrategy) else None
    if mesh is not None and "tensor_parallel" in mesh.mesh_dim_names and mesh["tensor_parallel"].size() > 1:
        given = "sync_batchnorm=True with tensor parallelism, whose ranks see the same batch"
        faults.add(given, fix="leave tensor_parallel out, or sync_batchnorm=True")
    # Lightning's DDPStrategy has replaced the batch norms before the plan is applied.
    if type(strategy) is DDPStrategy and strategy.root_device.type == "cpu":
        given = "sync_batchnorm=True with Lightning's DDPStrategy on a CPU, where torch's SyncBatchNorm does not run"
        faults.add(given, fix="use strategy='mp_ddp'")
    return sync_batchnorm.select(module, faults)


def _check_hook(strategy: DDPStrategy, policy: PrecisionPolicy, faults: Faults) -> None:
    """Add a fault if the user's communication hook of DDP contradicts ``reduce_dtype``.

    It does if its name contains "compress", or if a parameter is stored in another dtype.
    """
    hooks = [getattr(hook, "__name__", str(hook)) for hook in ddp_hooks(strategy) if hook is not None]
    stored = {policy.storage_dtype, *(pin.dtype for pin in policy.pins if pin.accumulate is None)}
    if hooks and (stored != {policy.reduce_dtype} or any("compress" in name for name in hooks)):
        given = f"DDPStrategy(ddp_comm_hook={hooks[0]}) with reduce_dtype={policy.reduce_dtype!r}"
        faults.add(given, fix="remove the hook; MixedPrecisionPlan(reduce_dtype='fp16'), or 'bf16', sums in that dtype")


def check_users_sharding(module: nn.Module, policy: PrecisionPolicy, pin_map: PinMap, faults: Faults) -> None:
    """Add a fault for each contradiction between the plan and ``fully_shard`` calls before it.

    ``configure_model`` or an earlier run made these calls. A sharded parameter may have another
    storage dtype than the plan's, and a unit another reduce dtype.
    """
    pinned, wrong = pin_map.dtypes(), list[str]()
    for name, parameter in module.named_parameters():
        wanted, dtype = pinned.get(id(parameter), policy.storage_dtype), parameter.dtype
        cast_to_it = dtype in TORCH_DTYPES.values() or (dtype == torch.float64 and wanted != "fp32")
        # A sharded parameter can no longer be cast.
        if hasattr(parameter.data, "to_local") and dtype != to_torch(wanted) and cast_to_it:
            wrong.append(f"{name!r} in {dtype}, which the plan stores in {wanted}")
    if wrong:
        faults.add(f"{len(wrong)} parameters sharded already, such as {wrong[0]}", fix=f"{_INSTEAD}, with a new module")
    reduce_dtype = to_torch(policy.reduce_dtype)
    for name, mixed, own in sharding_compat.policies(module):
        # Without a reduce_dtype, torch sums gradients in the dtype in which it gathers weights.
        if mixed.param_dtype is not None or (mixed.reduce_dtype or own) != reduce_dtype:
            given = f"fully_shard on {name!r} with {mixed}, where the plan sums in {reduce_dtype}"
            faults.add(given, fix=f"write MixedPrecisionPolicy(reduce_dtype={reduce_dtype}), or {_INSTEAD}")
