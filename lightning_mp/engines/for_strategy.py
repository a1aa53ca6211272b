"""Which Lightning strategies a plan runs on, with which engine, and what it refuses on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

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
from lightning_mp.engines.base import StepEngine
from lightning_mp.engines.eager import EagerEngine
from lightning_mp.engines.sharded import ShardedEngine
from lightning_mp.engines.user_sharding import check_users_sharding
from lightning_mp.errors import Faults
from lightning_mp.modules import sync_batchnorm
from lightning_mp.numerics.scaler import LossScaler
from lightning_mp.numerics.step_counter import StepCounter
from lightning_mp.policy import PrecisionPolicy


def engine_of(strategy: Strategy | None) -> type[StepEngine]:
    """The engine for ``strategy``; this package's own strategies name theirs in ``plan_engine``."""
    own = getattr(strategy, "plan_engine", None)
    if own is not None:
        return cast("type[StepEngine]", own)
    return ShardedEngine if isinstance(strategy, ModelParallelStrategy) else EagerEngine


def make_engine(
    strategy: Strategy | None,
    policy: PrecisionPolicy,
    device: torch.device,
    *,
    steps: StepCounter,
    scaler: LossScaler | None,
    global_step: Callable[[], int],
) -> StepEngine:
    """The engine that carries ``policy`` out on ``strategy``; ``None``: on one device, without a Trainer."""
    return engine_of(strategy)(
        policy,
        device=device,
        step_counter=steps,
        scaler=scaler,
        distributed=isinstance(strategy, ParallelStrategy) and strategy.world_size > 1,
        global_step=global_step,
    )


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
            "all_gather=True with mp_fsdp2 and mp_hsdp, or where every process holds all weights",
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
    if layer_sync is None:
        return []
    host = type(strategy).__name__
    if type(layer_sync) is not TorchSyncBatchNorm:
        if isinstance(strategy, (ModelParallelStrategy, DeepSpeedStrategy)):
            faults.add(
                f"plugin {type(layer_sync).__name__} with {host}, which has no place for it",
                "sync_batchnorm=True, or a strategy that calls the plugin",
                "use strategy='mp_ddp', or do in the module what the plugin does",
            )
        return []
    mesh = mesh_of(strategy) if isinstance(strategy, ModelParallelStrategy) else None
    if mesh is not None and "tensor_parallel" in mesh.mesh_dim_names and mesh["tensor_parallel"].size() > 1:
        faults.add(
            "sync_batchnorm=True with tensor parallelism, whose ranks see the same batch",
            "strategies whose ranks each see a part of the batch",
            "leave tensor_parallel out, or sync_batchnorm=True",
        )
    if type(strategy) is DDPStrategy and strategy.root_device.type == "cpu":  # it has replaced them by now
        faults.add(
            "sync_batchnorm=True with Lightning's own DDPStrategy on a CPU, where torch's SyncBatchNorm does not run",
            "a GPU, or this package's own strategies, which synchronize batch norms on a CPU as well",
            "use strategy='mp_ddp'",
        )
    return sync_batchnorm.select(module, faults)


def _refuse_stock(strategy: Strategy, instead: str, why: str, faults: Faults) -> None:
    faults.add(
        f"strategy {type(strategy).__name__}",
        f"a single device, DDP, or this package's own strategies: {why}",
        f"use Trainer(strategy={instead!r})",
    )


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
            "one of the two to decide the dtype gradients are summed in",
            "remove the hook and set MixedPrecisionPlan(reduce_dtype='fp16'), or 'bf16'",
        )
    elif {policy.storage_dtype, *(pin.dtype for pin in policy.pins)} != {policy.reduce_dtype}:
        faults.add(
            f"{given} where gradients are summed in another dtype than their own",
            "no communication hook where parameters or pins are not stored in reduce_dtype",
            "remove the hook",
        )
