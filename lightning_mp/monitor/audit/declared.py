"""What a precision plugin declares, module by module: a plan's policy, or Lightning's own by their documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from lightning_mp.compat.lightning import (
    DDPStrategy,
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    SingleDeviceStrategy,
    Strategy,
    Trainer,
    ddp_hooks,
)
from lightning_mp.engines import for_strategy
from lightning_mp.errors import Faults
from lightning_mp.modules import fp8, pins
from lightning_mp.monitor.audit.judge import AS_STORED, Declaration
from lightning_mp.numerics.dtypes import describe, dtype_name
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.words import DTYPES_OF

_STOCK = (MixedPrecision, HalfPrecision, DoublePrecision)


def by_trainer(trainer: Trainer, modules: Mapping[str, nn.Module]) -> Declaration:
    """What the Trainer's plugin, with the strategy it is on, declares for ``modules``."""
    plugin = trainer.precision_plugin
    policy = getattr(plugin, "policy", None)
    if isinstance(policy, PrecisionPolicy):
        return by_policy(policy, modules, trainer.strategy.root_device, getattr(plugin, "engine", None))
    return by_stock(plugin, trainer.strategy, modules)


def by_any(
    plan: Precision | PrecisionPolicy | str | None, modules: Mapping[str, nn.Module], device: torch.device
) -> Declaration:
    """What a plan, its policy, a stock plugin or a precision declares for a module on ``device``."""
    if plan is None:
        note = "no plan was given: dtypes are shown, and only pins are judged"
        return Declaration(by="nothing but pins", pins=in_force(modules), notes=(note,))
    policy = getattr(plan, "policy", PrecisionPolicy(precision=plan) if isinstance(plan, str) else plan)
    if not isinstance(policy, PrecisionPolicy):
        return by_stock(cast("Precision", plan), None, modules)
    if policy.precision == "auto":
        policy = for_strategy.resolved(policy, describe(device), modules[""])
    return by_policy(policy, modules, device)


def by_policy(
    policy: PrecisionPolicy, modules: Mapping[str, nn.Module], device: torch.device, engine: Any = None
) -> Declaration:
    """What a policy declares; ``engine``, while a run lasts, knows which pin covers which module."""
    facts = describe(device)
    pin_map = pins.resolve(modules[""], policy.pins, Faults("audit")) if engine is None else engine.pin_map
    pinned = {id(member.module): member.pin.dtype for member in pin_map.members}
    converted: set[int] = set()
    if policy.fp8 is not None:
        running = None if engine is None else engine.fp8
        covered = [member.module for member in pin_map.members]
        chosen = running.modules if running else fp8.select(modules[""], policy.fp8, covered, Faults("audit"))[1]
        converted = set(map(id, chosen))
    without_tf32 = f"tf32={policy.tf32!r} changes nothing on {facts.name}: it has no TF32"
    return Declaration(
        by=f"MixedPrecisionPlan({policy.precision!r})",
        plan=True,
        storage=policy.storage_dtype,
        compute=policy.compute_dtype,
        reduce=policy.reduce_dtype,
        state=AS_STORED,
        autocast=policy.mixed,
        frozen=True,
        tf32=None if policy.tf32 is None or not facts.tf32 else policy.tf32 != "highest",
        pins={name: pinned[id(module)] for name, module in modules.items() if id(module) in pinned},
        fp8=frozenset(name for name, module in modules.items() if id(module) in converted),
        fp8_but_weights=policy.fp8 is not None and policy.fp8.recipe.endswith("_gw_hp"),
        notes=(without_tf32,) if policy.tf32 is not None and not facts.tf32 else (),
    )


def by_stock(plugin: Precision, strategy: Strategy | None, modules: Mapping[str, nn.Module]) -> Declaration:
    """What one of Lightning's own plugins does, as its documentation has it; FSDP's and DeepSpeed's are not judged."""
    precision = str(plugin.precision)
    by, bound = f"{type(plugin).__name__}({precision!r})", in_force(modules)
    _, half = DTYPES_OF.get(precision, (None, None))
    if half is None or not (isinstance(plugin, _STOCK) or type(plugin) is Precision):
        note = f"what {type(plugin).__name__} declares for a module is not known here: dtypes are shown, not judged"
        return Declaration(by=by, pins=bound, notes=(note,))
    mixed, own_sum = precision.endswith("-mixed"), isinstance(strategy, DDPStrategy) and ddp_hooks(strategy)[0] is None
    return Declaration(
        by=by,
        pins=bound,
        compute=half,
        storage="fp32" if mixed else half,
        reduce=AS_STORED if own_sum or isinstance(strategy, SingleDeviceStrategy) else None,
        state=AS_STORED,
        autocast=mixed,
        frozen=isinstance(plugin, HalfPrecision),  # casts all; elsewhere frozen weights need no fp32 copy
    )


def in_force(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The pins that modules themselves carry: those of a plan that was applied, or of ``DtypePinning``."""
    states = {name: module.__dict__.get("_lmp_pin") for name, module in modules.items()}
    return {name: dtype_name(cast("pins.PinState", state).dtype) for name, state in states.items() if state is not None}
