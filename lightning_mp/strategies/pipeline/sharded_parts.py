"""The stages on this rank, whole or sharded over their replicas with FSDP2."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_mp.engines.base import StepEngine
from lightning_mp.errors import Faults
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.strategies.pipeline.parts import Part
from lightning_mp.strategies.shard_units import Units, units
from lightning_mp.strategies.sharding import Sharding, shard


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
