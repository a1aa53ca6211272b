"""On which devices and Lightning strategies a plan runs, with which engine, and what it refuses on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_mp.compat import torch_sharding as sharding_compat
from lightning_mp.compat.checks import check_versions
from lightning_mp.compat.lightning import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    TorchSyncBatchNorm,
    Trainer,
    ddp_hooks,
    layer_sync_of,
    mesh_of,
    rank_zero_info,
)
from lightning_mp.compat.torchao import emulates
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.eager import EagerEngine
from lightning_mp.engines.sharded import ShardedEngine
from lightning_mp.errors import Faults
from lightning_mp.modules import sync_batchnorm
from lightning_mp.modules.pins import PinMap
from lightning_mp.numerics.device import set_tf32
from lightning_mp.numerics.dtypes import TORCH_DTYPES, to_torch
from lightning_mp.policy import PrecisionPolicy, hardware

_INSTEAD = "use strategy='mp_fsdp2' without configure_model, which shards after the plan is applied"

# ------------------------------------------------------------------ the device


def resolved(policy: PrecisionPolicy, device: hardware.Device, module: nn.Module) -> PrecisionPolicy:
    """``policy`` with the precision that ``auto`` means for ``module`` on ``device``; the reason is logged."""
    choice = hardware.choose(device, sum(parameter.numel() for parameter in module.parameters()))
    rank_zero_info(f"precision 'auto' is {choice.precision!r}: {choice.reason}")
    return replace(
        policy,
        precision=choice.precision,
        tf32=policy.tf32 or choice.tf32,
        loss_scaling=policy.loss_scaling if choice.precision.startswith("16") else None,
    )


def check_device(policy: PrecisionPolicy, device: hardware.Device, faults: Faults) -> None:
    """Note why ``device`` cannot compute what the policy declares."""
    emulate = policy.fp8 is not None and policy.fp8.anywhere
    refused = hardware.refusal(device, policy.precision, emulate=emulate)
    if refused is not None:
        faults.add(*refused)


def switch_tf32(policy: PrecisionPolicy, device: hardware.Device) -> Callable[[], None] | None:
    """Set TF32 as the policy says, where the device has it; what puts it back. What is slow there is said."""
    if device.bf16 == "emulated" and policy.precision.startswith("bf16"):
        rank_zero_info(f"bf16 is emulated on {device.name}: right, but no faster than fp32")
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


# ------------------------------------------------------------------ the strategy


def engine_of(strategy: Strategy | None) -> type[StepEngine]:
    """The engine for ``strategy``; this package's own strategies name theirs in ``plan_engine``."""
    own = getattr(strategy, "plan_engine", None)
    if own is not None:
        return cast("type[StepEngine]", own)
    return ShardedEngine if isinstance(strategy, ModelParallelStrategy) else EagerEngine


def is_distributed(strategy: Strategy | None) -> bool:
    """Whether several processes take part."""
    return isinstance(strategy, ParallelStrategy) and strategy.world_size > 1


def shards(trainer: Trainer | None) -> bool:
    """Whether the Trainer's strategy lays the module out anew for each run."""
    return trainer is not None and engine_of(trainer.strategy) is not EagerEngine


def describe(strategy: Strategy) -> str:
    """The strategy's name, and what it does with parameters."""
    world = getattr(strategy, "world_size", 1)
    processes = "1 process" if world == 1 else f"{world} processes"
    return f"{type(strategy).__name__}, {processes}: {engine_of(strategy).holds}"


def check_hosts(strategy: Strategy | None) -> None:
    """Raise where torch, Lightning or, under ZeRO, DeepSpeed is a release whose private names are not known.

    Raises:
        PlanError: the release, and those that this package is tested with.
    """
    with Faults() as faults:
        zero = isinstance(strategy, DeepSpeedStrategy)
        check_versions(faults, "torch", "lightning", *(["deepspeed"] if zero else []))


def completed(strategy: Strategy | None, policy: PrecisionPolicy) -> PrecisionPolicy:
    """``policy`` with what the strategy's own config says where the plan says nothing; a line tells of it."""
    own = getattr(strategy, "completed", None)
    whole = policy if own is None else cast("PrecisionPolicy", own(policy))
    if whole != policy:
        rank_zero_info(f"DeepSpeed config: loss_scaling={whole.loss_scaling!r} is the JSON's, the plan has none")
    return whole


def check(strategy: Strategy, engine: StepEngine, module: nn.Module, faults: Faults) -> Any:
    """Note why the plan cannot run on ``strategy``, and which ``mp_*`` strategy can.

    Returns what the strategy's own ``check_plan`` does; ``None`` where it has none.
    """
    policy = engine.policy
    shards = isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy, ModelParallelStrategy))
    if policy.fp8 is not None and policy.fp8.all_gather and shards and not hasattr(strategy, "gathers_fp8"):
        faults.add(
            f"FP8(all_gather=True) with {type(strategy).__name__}, which gathers weights as they are stored",
            "leave out all_gather=True, or use strategy='mp_fsdp2'",
        )
    own = getattr(strategy, "check_plan", None)
    if own is not None:
        return own(engine, module, faults)
    # before DDP: DeepSpeedStrategy is a DDPStrategy by inheritance only
    if isinstance(strategy, DeepSpeedStrategy):
        _refuse_stock(strategy, _zero_name(strategy), "its engine casts, scales and skips by rules of its own", faults)
    elif isinstance(strategy, FSDPStrategy):
        _refuse_stock(strategy, "mp_fsdp1", "it gathers and reduces in dtypes of its own", faults)
    elif isinstance(strategy, ModelParallelStrategy):
        mesh = mesh_of(strategy)
        replicas = 1 if mesh is None else mesh["data_parallel"].size()
        check_users_sharding(module, policy, engine.pin_map, faults, replicas=replicas)
    elif isinstance(strategy, DDPStrategy):
        _check_hook(strategy, policy, faults)
    elif not isinstance(strategy, SingleDeviceStrategy):
        _refuse_stock(strategy, "mp_ddp", "what it makes of a plan is not tested", faults)
    return None


def synced(strategy: Strategy, module: nn.Module, faults: Faults) -> list[nn.Module]:
    """The batch norms that ``sync_batchnorm=True`` means; notes why they cannot be synchronized, if so."""
    layer_sync = layer_sync_of(strategy)
    if type(layer_sync) is not TorchSyncBatchNorm:  # none, or a class of the user's own
        return []
    mesh = mesh_of(strategy) if isinstance(strategy, ModelParallelStrategy) else None
    if mesh is not None and "tensor_parallel" in mesh.mesh_dim_names and mesh["tensor_parallel"].size() > 1:
        faults.add(
            "sync_batchnorm=True with tensor parallelism, whose ranks see the same batch",
            "leave tensor_parallel out, or sync_batchnorm=True",
        )
    if type(strategy) is DDPStrategy and strategy.root_device.type == "cpu":  # it has replaced them by now
        faults.add(
            "sync_batchnorm=True with Lightning's own DDPStrategy on a CPU, where torch's SyncBatchNorm does not run",
            "use strategy='mp_ddp'",
        )
    return sync_batchnorm.select(module, faults)


def _refuse_stock(strategy: Strategy, instead: str, why: str, faults: Faults) -> None:
    faults.add(f"strategy {type(strategy).__name__}", f"use Trainer(strategy={instead!r})")


def _zero_name(strategy: DeepSpeedStrategy) -> str:
    config = cast("Any", strategy.config)
    zero = config.get("zero_optimization", {}) if isinstance(config, dict) else {}
    offload = "_offload" if {"offload_optimizer", "offload_param"} & set(zero) else ""
    return f"mp_deepspeed_zero{zero.get('stage') or 1}{offload}"


def _check_hook(strategy: DDPStrategy, policy: PrecisionPolicy, faults: Faults) -> None:
    """A communication hook of the user's own decides what is summed; so does ``reduce_dtype``."""
    hook, wrapper = ddp_hooks(strategy)
    if hook is None:
        return
    given = f"DDPStrategy(ddp_comm_hook={getattr(hook, '__name__', hook)})"
    if any("compress" in getattr(item, "__name__", "") for item in (hook, wrapper)):
        faults.add(
            f"{given} beside reduce_dtype={policy.reduce_dtype!r}",
            "remove the hook and set MixedPrecisionPlan(reduce_dtype='fp16'), or 'bf16'",
        )
    elif {policy.storage_dtype, *(pin.dtype for pin in policy.pins)} != {policy.reduce_dtype}:
        faults.add(f"{given} where gradients are summed in another dtype than their own", "remove the hook")


# ------------------------------------------------------------------ a model that its user sharded


def check_users_sharding(
    module: nn.Module, policy: PrecisionPolicy, pin_map: PinMap, faults: Faults, *, replicas: int = 1
) -> None:
    """Note what ``configure_model``, or a run before, decided otherwise than the plan.

    ``replicas`` is how many ranks have data of their own: between them every gradient has to be summed.
    """
    _check_storage(module, policy, pin_map, faults)
    whole = [name for name, parameter in module.named_parameters() if _left_whole(parameter)]
    if whole and replicas > 1:
        faults.add(
            f"{len(whole)} trained parameters that configure_model leaves whole, such as {whole[0]!r}, on {replicas} "
            "data-parallel ranks",
            f"shard the module they are in too, or {_INSTEAD}",
        )
    reduce_dtype = to_torch(policy.reduce_dtype)
    for name, mixed, own in _policies(module):
        if mixed.param_dtype is not None:
            faults.add(
                f"fully_shard on {name!r} with MixedPrecisionPolicy(param_dtype={mixed.param_dtype})",
                f"remove param_dtype, or {_INSTEAD}",
            )
        # Without one, torch sums in the dtype that is gathered.
        if (mixed.reduce_dtype or mixed.param_dtype or own) != reduce_dtype:
            faults.add(
                f"fully_shard on {name!r} with MixedPrecisionPolicy(reduce_dtype={mixed.reduce_dtype}) beside the "
                f"plan's reduce_dtype={policy.reduce_dtype!r}",
                f"write MixedPrecisionPolicy(reduce_dtype={reduce_dtype}), or {_INSTEAD}",
            )


def _left_whole(parameter: nn.Parameter) -> bool:
    return parameter.requires_grad and not hasattr(parameter.data, "to_local")


def _check_storage(module: nn.Module, policy: PrecisionPolicy, pin_map: PinMap, faults: Faults) -> None:
    """A sharded parameter can no longer be cast: it has to be stored as declared already."""
    pinned = pin_map.dtypes()
    wrong: list[tuple[str, torch.dtype, str]] = []
    for name, parameter in module.named_parameters():
        wanted = pinned.get(id(parameter), policy.storage_dtype)
        sharded = hasattr(parameter.data, "to_local")
        cast = parameter.dtype in TORCH_DTYPES.values() or (parameter.dtype == torch.float64 and wanted != "fp32")
        if sharded and cast and parameter.dtype != to_torch(wanted):
            wrong.append((name, parameter.dtype, wanted))
    if wrong:
        name, dtype, wanted = wrong[0]
        faults.add(
            f"{len(wrong)} parameters sharded already, such as {name!r} in {dtype}, where the plan stores {wanted}",
            f"{_INSTEAD}; after a run under another plan, make a new module",
        )


def _policies(module: nn.Module) -> Iterator[tuple[str, Any, torch.dtype]]:
    """Each unit's name and policy, and the dtype its trainable parameters are stored in."""
    for name, submodule in module.named_modules():
        if not isinstance(submodule, FSDPModule):
            continue
        held = map(sharding_compat.shard_of, sharding_compat.fsdp2_parameters(submodule))
        stored = next((parameter.dtype for parameter in held if parameter.requires_grad), None)
        if stored is not None:
            yield name, sharding_compat.fsdp2_policy(submodule), stored
