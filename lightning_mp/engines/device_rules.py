"""What the device at hand decides: which precision ``auto`` is, and whether TF32 is there to be switched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from lightning_mp.compat.lightning import rank_zero_info
from lightning_mp.errors import Faults
from lightning_mp.numerics.tf32 import set_tf32
from lightning_mp.policy import PrecisionPolicy, hardware


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


def check(policy: PrecisionPolicy, device: hardware.Device, faults: Faults) -> None:
    """Note why ``device`` cannot compute what the policy declares."""
    emulate = policy.fp8 is not None and policy.fp8.emulate
    refused = hardware.refusal(device, policy.precision, emulate=emulate)
    if refused is not None:
        faults.add(*refused)


def switch_tf32(policy: PrecisionPolicy, device: hardware.Device) -> Callable[[], None] | None:
    """Set TF32 as the policy says, where the device has it; what puts it back. What is slow there is said."""
    if device.bf16 == "emulated" and policy.precision.startswith("bf16"):
        rank_zero_info(f"bf16 is emulated on {device.name}: right, but no faster than fp32")
    if policy.fp8 is not None and (device.type != "cuda" or policy.fp8.emulate):
        rank_zero_info(f"fp8 on {device.name} is for checking, not for speed: it is slower than bf16 there")
    if policy.tf32 is None:
        return None
    if device.tf32:
        return set_tf32(policy.tf32)
    rank_zero_info(f"tf32={policy.tf32!r} changes nothing on {device.name}: it has no TF32")
    return None
