"""What ZeRO cannot be asked for, found before it takes the module."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from torch import nn

from lightning_mp.checkpoints.formats import CheckpointFormatError, deepspeed_folder, kind_of
from lightning_mp.compat.checks import require_versions
from lightning_mp.errors import Faults, MissingExtraError
from lightning_mp.modules.pins import PinMap
from lightning_mp.policy import PrecisionPolicy


def require_deepspeed() -> None:
    """Raise if DeepSpeed is missing, or a release that is out of bounds."""
    try:
        import_module("deepspeed")
    except ImportError as error:
        raise MissingExtraError("deepspeed", "deepspeed", "a ZeRO strategy") from error
    require_versions("strategy", "deepspeed")


def check_world_size(path: Path, processes: int) -> None:
    """Each rank resumes from its own piece; weights alone, to evaluate or consolidate, can be read by any number."""
    if kind_of(path) != "deepspeed":
        return
    wrote = len(list(deepspeed_folder(path).glob("*_optim_states.pt")))
    if wrote != processes:
        raise CheckpointFormatError(
            f"{str(path)!r}, a ZeRO run of {wrote} processes, to be resumed with {processes}",
            "the number of processes that wrote it: optimizer state is in pieces, one a process",
            f"start {wrote} processes, or use strategy='mp_fsdp2' or 'mp_ddp', which resume from its weights and scale",
        )


def check_storage(
    policy: PrecisionPolicy, pin_map: PinMap, module: nn.Module, stage: int, offload: bool, faults: Faults
) -> None:
    """Half-precision weights: only ZeRO-1/2 can be made to keep no fp32 copy of them."""
    if stage < 3 and not offload:
        return
    why = "ZeRO-3" if stage == 3 else "ZeRO's optimizer offload"
    if policy.storage_dtype != "fp32":
        faults.add(
            f"precision={policy.precision!r} with {why}, which keeps fp32 master weights and fp32 optimizer state",
            "weights stored in fp32",
            f"use {policy.precision.replace('true', 'mixed')!r}, or strategy='mp_fsdp2' or 'mp_deepspeed_zero2'",
        )
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    for pin in dict.fromkeys(member.pin for member in pin_map.members if _trains(member.module, trained)):
        if pin.dtype != "fp32" and policy.storage_dtype == "fp32":
            faults.add(
                f"pin {pin.pattern!r} to {pin.dtype} with {why}, which keeps fp32 master weights of trained parameters",
                "pins to fp32, or pins on frozen modules",
                "remove the pin, or use strategy='mp_fsdp2' or 'mp_deepspeed_zero2'",
            )


def _trains(module: nn.Module, trained: set[int]) -> bool:
    return any(id(parameter) in trained for parameter in module.parameters(recurse=False))
