"""The table of strategies by name, for ``make_strategy`` and Lightning's registry (``mp_<name>``).

A strategy's module is imported when the strategy is built.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_mp.compat import check_versions, lightning
from lightning_mp.errors import Faults, did_you_mean
from lightning_mp.policy import PrecisionPolicy

if TYPE_CHECKING:
    from lightning_mp.compat.lightning import Strategy

PREFIX = "mp_"


class Entry(NamedTuple):
    """A strategy's class as ``module:name``, its description, and the keywords that it fixes."""

    home: str
    description: str
    fixed: Mapping[str, Any] = {}
    #: callables as ``module:name``, whose keywords the strategy takes too
    hosts: tuple[str, ...] = ()


_DDP = ("lightning_mp.compat.lightning:DDPStrategy", "torch.nn.parallel:DistributedDataParallel")
_FSDP1 = ("lightning_mp.compat.lightning:FSDPStrategy", "torch.distributed.fsdp:FullyShardedDataParallel")
_FULLY_SHARD = ("torch.distributed.fsdp:fully_shard",)
_ZERO = ("lightning_mp.compat.lightning:DeepSpeedStrategy",)
_OFFLOAD = {"cpu_offload": True}


def _zero(stage: int, **fixed: bool) -> Entry:
    how = ", weights of products in half precision," if "half_weights" in fixed else " with CPU offload" * bool(fixed)
    description = f"DeepSpeed ZeRO stage {stage}{how} under a plan"
    return Entry("deepspeed.strategy:PlanDeepSpeedStrategy", description, {"stage": stage, **fixed}, _ZERO)


_FSDP2_ENTRY = Entry("fsdp2.strategy:PlanFSDP2Strategy", "FSDP2 (fully_shard) under a plan", hosts=_FULLY_SHARD)
_FSDP1_ENTRY = Entry("strategies.fsdp1:PlanFSDP1Strategy", "FullyShardedDataParallel under a plan", hosts=_FSDP1)
STRATEGIES: dict[str, Entry] = {
    "auto": Entry("strategies.ddp:PlanDDPStrategy", "DDP, or one device where there is one", hosts=_DDP),
    "ddp": Entry("strategies.ddp:PlanDDPStrategy", "DistributedDataParallel under a plan", hosts=_DDP),
    "fsdp2": _FSDP2_ENTRY,
    "fsdp": _FSDP2_ENTRY,
    "hsdp": Entry("fsdp2.strategy:PlanHSDPStrategy", "FSDP2 within a node, replicas across nodes", hosts=_FULLY_SHARD),
    "fsdp1": _FSDP1_ENTRY,
    "fsdp2_offload": _FSDP2_ENTRY._replace(description="FSDP2 under a plan, shards on the CPU", fixed=_OFFLOAD),
    "fsdp1_offload": _FSDP1_ENTRY._replace(description="FSDP1 under a plan, shards on the CPU", fixed=_OFFLOAD),
    "pipeline": Entry("pipeline.strategy:PlanPipelineStrategy", "stages of layers over ranks under a plan"),
    "deepspeed_zero1": _zero(1),
    "deepspeed_zero2": _zero(2),
    "deepspeed_zero3": _zero(3),
    "deepspeed_zero1_half": _zero(1, half_weights=True),
    "deepspeed_zero2_half": _zero(2, half_weights=True),
    "deepspeed_zero1_offload": _zero(1, offload_optimizer=True),
    "deepspeed_zero2_offload": _zero(2, offload_optimizer=True),
    "deepspeed_zero3_offload": _zero(3, offload_optimizer=True, offload_parameters=True),
}

#: keywords that are refused, because the plan or the Trainer decides them
_THE_PLANS = frozenset((
    *(item.name for item in fields(PrecisionPolicy)),
    *("gradient_checkpointing", "activation_checkpointing", "activation_checkpointing_policy", "precision_plugin"),
    *("mixed_precision", "mp_policy", "mesh", "dp_mesh_dims", "device_id"),
    *("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale"),
))  # fmt: skip


def build(name: object, policy: PrecisionPolicy | None, overrides: Mapping[str, Any]) -> Strategy:
    """Return a new strategy by its name, with or without ``mp_`` in front.

    ``policy`` is passed to strategies that take it. ``overrides`` are keywords of the strategy and
    of its hosts.

    Raises:
        PlanError: an unknown name or keyword, with near ones; a keyword that the name, the plan or
            the Trainer decides; a package of an unsupported version; or a value that the strategy
            refuses.
        MissingExtraError: DeepSpeed is needed and not installed.
    """
    plain = str(name).lower().removeprefix(PREFIX)
    with Faults("make_strategy") as faults:
        if plain not in STRATEGIES:
            faults.unknown("strategy", name, STRATEGIES, "write one of these")
    entry = STRATEGIES[plain]
    cls = _load(f"lightning_mp.{entry.home}")
    own = _keywords([cls])
    allowed = sorted({*own, *_keywords(map(_load, entry.hosts))} - _THE_PLANS)
    with Faults("make_strategy") as faults:
        for key in overrides:
            if key in entry.fixed:
                faults.add(f"{key}={overrides[key]!r} with {name!r}", fix="choose the strategy whose name says so")
            elif key in _THE_PLANS:
                fix = "remove it; where it is to be said, MixedPrecisionPlan or Trainer has an argument for it"
                faults.add(f"{key}=... with {name!r}, which the plan or the Trainer decides", fix=fix)
            elif key not in allowed:
                own_word = f"write Trainer({key}=...)" if key in trainer_arguments() else ""
                fix = own_word or did_you_mean(key, allowed, "remove it")
                faults.add(f"unknown keyword {key!r} with {name!r}", allowed=", ".join(allowed), fix=fix)
        check_versions(faults, "torch", "lightning")
    checked = {"policy": policy} if "policy" in own else {}
    built = cls(**entry.fixed, **checked, **overrides)
    built.made_as = plain
    return built


def _load(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(import_module(module), name)


def trainer_arguments() -> list[str]:
    """Return the names of the Trainer's arguments."""
    return [name for name in inspect.signature(lightning.Trainer.__init__).parameters if name != "self"]


def _keywords(callables: Iterable[Callable[..., Any]]) -> list[str]:
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = (parameter for item in callables for parameter in inspect.signature(item).parameters.values())
    return [parameter.name for parameter in given if parameter.kind in kinds and parameter.name != "module"]


#: the builders that this package has registered with Lightning, by name
_registered: dict[str, Callable[..., Strategy]] = {}


def register(ending: str = "", builder: Callable[[str], Strategy] | None = None) -> None:
    """Register every strategy with Lightning, as ``mp_<name>`` with ``ending``.

    ``builder`` is called with the name without ``mp_``. It replaces an earlier builder of this
    package. Without ``builder`` a registered name stays as it is. A strategy that another package
    registered always stays.
    """
    entries: dict[str, Any] = dict(lightning.StrategyRegistry)  # its own ``get`` builds a strategy
    for name, entry in STRATEGIES.items():
        known_as = f"{PREFIX}{name}{ending}"
        present = entries.get(known_as)
        if present is not None and (builder is None or present["strategy"] is not _registered.get(known_as)):
            continue
        made: Any = partial(_built, name) if builder is None else partial(builder, name)
        lightning.StrategyRegistry.register(known_as, made, description=entry.description, override=True)
        _registered[known_as] = made


def _built(name: str) -> Strategy:
    return build(name, None, {})
