"""Modes in which the device is slower than it has to be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_mp.monitor.doctor.case import Case, listed, many
from lightning_mp.monitor.doctor.dims import conv1d
from lightning_mp.monitor.findings import Finding
from lightning_mp.policy import hardware


def bf16_emulated(case: Case) -> Iterator[Finding]:
    """bf16 on a device that computes it in fp32, or not at all."""
    device, pins = case.device, () if case.policy is None else case.policy.pins
    where = [pin.pattern for pin in pins if pin.dtype == "bf16"]
    if case.compute != "bf16" and not where:
        return
    if device.bf16 == "native":
        return
    refused = hardware.refusal(device, case.precision)
    instead = "'16-mixed', with loss scaling" if device.fp16 and device.type != "cpu" else "'32-true'"
    says = "has no bf16" if device.bf16 == "none" else "computes bf16 in fp32 and rounds"
    yield Finding(
        name="bf16_emulated",
        severity="error" if refused is not None else "info" if device.type == "cpu" else "warning",
        what=f"{device.name} {says}, under {case.precision}" + (f" with bf16 pins on {listed(where)}" if where else ""),
        why="the run is refused" if refused is not None else "results are correct, but no faster than in fp32",
        fix=f"use {instead} on this device, or precision='auto'",
    )


def tf32_off(case: Case) -> Iterator[Finding]:
    """fp32 products on a device with TF32, where TF32 is neither allowed nor ruled out."""
    tf32 = None if case.policy is None else case.policy.tf32
    callbacks: Any = case.argument("callbacks", ())
    callbacks = callbacks if isinstance(callbacks, (list, tuple)) else (callbacks,)
    named = any(type(callback).__name__ == "EnableTF32" for callback in callbacks)
    if not case.device.tf32 or tf32 is not None or named or torch.get_float32_matmul_precision() != "highest":
        return
    found = [name for name, module in case.modules if _multiplies_in_fp32(case, module)]
    if found:
        planned = "set MixedPrecisionPlan(tf32='high')", "tf32='highest'"
        high, highest = planned if case.policy is not None else ("add EnableTF32()", "EnableTF32('highest')")
        yield Finding(
            name="tf32_off",
            severity="info",
            what=f"products in IEEE fp32 in {many(len(found), 'module')} on {case.device.name}: {listed(found)}",
            why="its tensor cores take fp32 products in TF32 (10 bits of mantissa, fp32's range), several times faster",
            fix=f"{high}, or torch.set_float32_matmul_precision('high'); {highest} says that IEEE fp32 is intended",
            where=found[0],
        )


def _multiplies_in_fp32(case: Case, module: nn.Module) -> bool:
    if not (isinstance(module, (nn.Linear, nn.Bilinear, nn.MultiheadAttention)) or conv1d(module)):
        return False
    return (case.pinned.get(id(module)) or case.compute) == "fp32"
