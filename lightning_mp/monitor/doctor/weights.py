"""Weights in half precision: trained without fp32 master weights, refused by a scaler, tied and pinned twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lightning_mp.compat.lightning import DeepSpeedStrategy
from lightning_mp.monitor.doctor.case import HALF, Case, listed, many
from lightning_mp.monitor.dtype_names import dtype_name
from lightning_mp.monitor.events import Severity
from lightning_mp.monitor.findings import Finding

#: bits of the significand, the hidden one included
_BITS = {"bf16": 8, "fp16": 11}


def _lost(dtype: str) -> str:
    return f"{dtype} has {_BITS[dtype]} bits of precision: an update below 2**-{_BITS[dtype]} of its weight is lost"


def loaded_in_half(case: Case) -> Iterator[Finding]:
    """Trained weights that arrive in half precision although nothing asks for it."""
    if case.storage in HALF or (case.policy is None and case.storage is not None):
        return  # by the mode, or cast to what it stores
    found = {
        name: dtype_name(parameter.dtype)
        for name, _, parameter in case.trained
        if dtype_name(parameter.dtype) in HALF and id(parameter) not in case.pinned
    }
    if not found:
        return
    dtype = Counter(found.values()).most_common(1)[0][0]
    load = "load them in fp32: from_pretrained(..., dtype=torch.float32), or model.float() before training"
    severity: Severity = "info"
    if case.policy is None:
        severity = "warning"
        why = f"{case.precision} updates them in place, without fp32 master weights; {_lost(dtype)}"
        fix = f"{load}; a MixedPrecisionPlan('{case.precision}') stores them in fp32 itself"
    else:
        why = f"the plan makes fp32 master weights from them, at twice the memory; they stay rounded to {dtype}"
        fix = load
    yield Finding(
        name="no_fp32_masters",
        severity=severity,
        what=f"{many(len(found), 'trained weight')} in {dtype} under {case.precision}: {listed(found)}",
        why=why,
        fix=fix,
        where=next(iter(found)),
    )


def stored_in_half(case: Case) -> Iterator[Finding]:
    """Trained weights that the mode, or a pin, stores in half precision."""
    by_mode = [name for name, _, p in case.trained if case.storage in HALF and case.stored(p) in HALF]
    if by_mode and case.storage is not None:
        mixed = case.precision.replace("true", "mixed") if case.precision.endswith("true") else "bf16-mixed"
        yield Finding(
            name="no_fp32_masters",
            severity="warning",
            what=f"{case.precision} trains {many(len(by_mode), 'weight')}, stored in {case.storage} alone",
            why=f"there are no fp32 master weights; {_lost(case.storage)}",
            fix=f"use '{mixed}', which keeps fp32 weights and computes in {case.storage}",
        )
        return
    by_pin = [name for name, _, p in case.trained if case.pinned.get(id(p)) in HALF]
    if by_pin:
        yield Finding(
            name="no_fp32_masters",
            severity="info",
            what=f"pins store {many(len(by_pin), 'trained weight')} in half precision: {listed(by_pin)}",
            why="they have no fp32 master weights: small updates are rounded away",
            fix="pin them to 'fp32', or remove the pin, unless this is intended",
            where=by_pin[0],
        )


def fp16_under_a_scaler(case: Case) -> Iterator[Finding]:
    """Trained fp16 weights beside torch's GradScaler, which refuses their gradients."""
    found = [name for name, _, p in case.trained if dtype_name(p.dtype) == "fp16" and id(p) not in case.pinned]
    sharded = isinstance(case.strategy, DeepSpeedStrategy) or "deepspeed" in str(case.strategy)
    if not found or case.precision != "16-mixed" or (case.policy is None and sharded):
        return
    severity: Severity = "error"
    why = "GradScaler raises 'Attempting to unscale FP16 gradients' on the first step"
    fix = "load them in fp32, or train under MixedPrecisionPlan('16-mixed'), which stores them in fp32"
    if case.policy is not None:
        severity, why = "info", "torch's own GradScaler would refuse them; the plan stores them in fp32 first"
        fix = "load them in fp32: from_pretrained(..., dtype=torch.float32)"
    yield Finding(
        name="fp16_params_under_scaler",
        severity=severity,
        what=f"{many(len(found), 'trained weight')} in fp16 under a loss scale: {listed(found)}",
        why=why,
        fix=fix,
        where=found[0],
    )


def tied_pins(case: Case) -> Iterator[Finding]:
    """A tied weight whose two names are pinned to different dtypes."""
    for fault in case.pin_faults.found:
        said, _, places = fault.given.partition(": ")
        if said == "contradicting pins on tied weights":
            yield Finding(
                name="tied_weights_conflicting_pins",
                severity="error",
                what=f"tied weights are pinned to different dtypes: {places}",
                why="a tied weight is one tensor and has one dtype; the run is refused before its first step",
                fix=fault.fix,
                where=places.partition(" ")[0],
            )
