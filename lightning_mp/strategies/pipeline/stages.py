"""The stages of a module: which parameter belongs to which, why a module cannot be cut, and how a stage is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import Faults
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.strategies.meta_device import cannot_initialise
from lightning_mp.strategies.pipeline import transformers_stages
from lightning_mp.strategies.shard_units import Units, units
from lightning_mp.strategies.sharding import Sharding, shard

#: makes stage ``index`` of ``count`` out of the module's own submodules
MakeStage = Callable[[int, int], nn.Module]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a module is cut: what makes a stage, and the stage of each parameter and buffer by its name."""

    make: MakeStage
    count: int
    parameters: dict[str, int]
    buffers: dict[str, int]


def maker(module: nn.Module, count: int, faults: Faults) -> MakeStage | None:
    """The module's own ``pipeline_stage``, or what does the same for the one transformers model in it."""
    own: Any = getattr(module, "pipeline_stage", None)
    if own is not None:
        return cast("MakeStage", own)
    found = transformers_stages.decoders(module)
    if len(found) != 1:
        known = ", ".join(transformers_stages.KNOWN)
        faults.add(
            f"{type(module).__name__} without pipeline_stage(index, count), and with {len(found)} models that are cut "
            "without it",
            f"define pipeline_stage(self, index, count), made of the module's own submodules, or use one of {known}",
        )
        return None
    model, layers = found[0], transformers_stages.layers_of(found[0])
    if count > layers:
        faults.add(
            f"{count} stages of {type(model).__name__}, which has {layers} layers",
            f"use at most {layers} stages, those that one process holds counted in",
        )
        return None
    return lambda index, total: transformers_stages.stage(model, index, total)


def cut(module: LightningModule, count: int, faults: Faults) -> Cut | None:
    """Where each parameter goes; notes what is tied across stages, what is in none, and what is not the module's."""
    _check_plain(module, faults)
    make = None if faults.found else maker(module, count, faults)
    if make is None:
        return None
    stages = [make(index, count) for index in range(count)]
    known = {id(parameter) for parameter in module.parameters()}
    for index, stage in enumerate(stages):
        if any(id(parameter) not in known for parameter in stage.parameters()):
            faults.add(
                f"pipeline_stage({index}, {count}) has a parameter which is not the module's own",
                "use the module's submodules themselves, not copies or new ones, so that checkpoints keep its names",
            )
    held = [{id(one) for one in (*stage.parameters(), *stage.buffers())} for stage in stages]

    def homes(tensor: torch.Tensor) -> list[int]:
        return [index for index, own in enumerate(held) if id(tensor) in own]

    parameters: dict[str, int] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        where = homes(parameter)
        if len(where) > 1:
            stated = " and ".join(map(str, where))
            faults.add(
                f"{name!r} is in the stages {stated}, as tied embeddings are",
                "untie them (transformers: tie_word_embeddings=False), or use strategy='mp_fsdp2'",
            )
        elif not where and parameter.requires_grad:
            faults.add(
                f"{name!r} is trained, and in none of the {count} stages",
                "put its module into the stage that uses it, or freeze it",
            )
        parameters[name] = where[0] if where else -1
    buffers = {name: (*homes(one), -1)[0] for name, one in module.named_buffers(remove_duplicate=False)}
    return Cut(make, count, parameters, buffers)


def _check_plain(module: nn.Module, faults: Faults) -> None:
    beside = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)
    wrapped: list[str] = []
    for name, part in module.named_modules():
        if isinstance(part, beside) or type(part).__name__ == "DeepSpeedEngine":
            wrapped.append(name or type(part).__name__)
    wrapped += [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    if wrapped:
        faults.add(
            f"{wrapped[0]!r} is sharded or wrapped already, and cannot be cut into pipeline stages",
            "leave out fully_shard, parallelize_module, FSDP1, DDP and DeepSpeed; shard=True shards each stage",
        )
    cannot_initialise(module, faults)


class Part(nn.Module):
    """One stage on this rank, run as the plan says: forward under autocast, backward outside of it."""

    def __init__(self, stage: nn.Module, context: Callable[[], Any]) -> None:
        super().__init__()
        self.stage, self._context = stage, context
        #: what the stage has besides the module's own parts, and whether it was trained before an evaluation
        self._modes: list[tuple[nn.Module, bool]] = []

    def forward(self, *inputs: Any) -> Any:
        """What the stage makes of the inputs."""
        with self._context():
            return self.stage(*inputs)

    def follow_mode(self, module: nn.Module) -> None:
        """Evaluate what only the stage has while ``module``, which does not know of it, is evaluated."""
        if self.training == module.training:
            return
        if not module.training:
            own = {id(one) for one in module.modules()}
            self._modes = [(one, one.training) for one in self.modules() if id(one) not in own]
        for one, trained in self._modes:
            one.training = trained and module.training


def units_of(stage: nn.Module, engine: StepEngine, faults: Faults) -> Units:
    """How a stage is cut into shard units; notes what cannot be."""
    inside = set(map(id, stage.modules()))
    members = tuple(member for member in engine.pin_map.members if id(member.module) in inside)
    pins = replace(engine.pin_map, members=members)
    return units(stage, None, pins, engine.stored_dtypes(), faults, together=engine.policy.storage_dtype)


def shard_part(part: Part, engine: StepEngine, mesh: DeviceMesh, policy: PrecisionPolicy) -> None:
    """Shard a stage over ``mesh``, block by block."""
    with Faults("strategy") as faults:
        cut = units_of(part, engine, faults)
    shard(part, cut, mesh, policy, Sharding())
