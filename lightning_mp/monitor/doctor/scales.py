"""Loss scales under which the first steps, or all of them, overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator

from lightning_mp.compat.lightning import LightningModule
from lightning_mp.monitor.advice import pinning
from lightning_mp.monitor.doctor.backward import highest_fitting_scale
from lightning_mp.monitor.doctor.case import Case
from lightning_mp.monitor.events import Severity
from lightning_mp.monitor.findings import Finding
from lightning_mp.policy.loss_scaling import FP32_MAX, TORCH_INIT_SCALE, LossScaling

FP16_MAX = 65504.0
#: the smallest positive number of fp16
FP16_TINY = 2.0**-24
#: Under it a gradient of 1/256 still fits into fp16: a mean over 256 numbers has such a one at the loss.
HIGH_SCALE = 2.0**24
#: Above it not even fp16's smallest number fits once scaled: whatever is not 0 overflows.
HOPELESS_SCALE = FP16_MAX / FP16_TINY
#: overflows in a row with which a healthy run in fp16 may begin
_WARM_UP = 5


def overflows_at_once(case: Case) -> Iterator[Finding]:
    """An initial scale that overflows: by a real backward pass where there is a batch, else by its size."""
    rule = case.scaling
    if rule is None:
        return
    if case.batch is not None:
        yield from _measured(case, rule)
    elif rule.init_scale > HIGH_SCALE:
        yield _by_size(case, rule)


def _by_size(case: Case, rule: LossScaling) -> Finding:
    stuck = rule.floor > HIGH_SCALE
    why = f"a gradient of {FP16_MAX / rule.init_scale:.1g} overflows fp16 once scaled"
    if stuck:
        severity: Severity = "error" if rule.floor > HOPELESS_SCALE else "warning"
        why += f", and the scale never falls below {rule.floor:g}: such steps are skipped forever"
    else:
        severity = "warning"
        why += f"; about {_steps(rule, TORCH_INIT_SCALE)} steps are skipped until the scale is down to 65536"
    return _finding(case, rule, severity, f"the loss scale starts at {rule.init_scale:g}", why)


def _measured(case: Case, rule: LossScaling) -> Iterator[Finding]:
    fits = highest_fitting_scale(case, rule)
    if fits == rule.init_scale:
        return
    what = f"the given batch overflows at the initial loss scale, {rule.init_scale:g}"
    if fits is None:
        why = "its loss, or a gradient of it, is not finite in fp16 at any scale: the overflow is in the forward pass"
        found = "nonfinite='raise'" if case.policy is not None else "NonFiniteGuard(on_trip='raise')"
        pinned = pinning(["…"], under_plan=case.policy is not None)
        fix = f"find the module with {found}, pin it, {pinned}, or use 'bf16-mixed', without loss_scaling"
        yield _finding(case, rule, "error", what, why, fix)
    elif fits < rule.floor:
        why = f"its gradients fit up to a scale of {fits:g}, and the scale never falls below {rule.floor:g}"
        yield _finding(case, rule, "error", what, why, f"use {_starting(case, rule, fits)}")
    else:
        steps = _steps(rule, fits)
        why = f"its gradients fit up to a scale of {fits:g}; about {steps} steps are skipped on the way there"
        fix = f"set {_starting(case, rule, min(fits, TORCH_INIT_SCALE))}"
        yield _finding(case, rule, "info" if steps <= _WARM_UP else "warning", what, why, fix)


def _steps(rule: LossScaling, scale: float) -> int:
    """How many overflows bring the scale down to ``scale``: the first backoff takes ``hysteresis`` of them."""
    backoffs = math.ceil(math.log(scale / rule.init_scale, rule.backoff_factor) - 1e-9)
    return backoffs - 1 + rule.hysteresis


def _starting(case: Case, rule: LossScaling, scale: float) -> str:
    """How the loss scale starts at ``scale``, with a floor that lets it."""
    if case.policy is None:
        return f"the plugin MixedPrecision('16-mixed', device, torch.amp.GradScaler(device, init_scale={scale!r}))"
    floor = f", min_scale={min(1.0, scale)!r}" if rule.min_scale > scale else ""
    return f"LossScaling(init_scale={scale!r}{floor})" + ("" if rule.dynamic else ", a dynamic scale")


def _finding(case: Case, rule: LossScaling, severity: Severity, what: str, why: str, fix: str | None = None) -> Finding:
    return Finding(
        name="scale_overflows_at_once",
        severity=severity,
        what=what,
        why=why,
        fix=fix or f"use {_starting(case, rule, TORCH_INIT_SCALE)}",
        where="loss_scaling.init_scale",
    )


def accumulation_overflows(case: Case) -> Iterator[Finding]:
    """Scaled gradients whose sum over micro-batches leaves the format they are stored in.

    Lightning divides each micro-batch's loss by their number, so that the sum is the scaled mean; a plain module's
    training loop may not.
    """
    rule, parts = case.scaling, int(case.argument("accumulate_grad_batches", 1))
    if rule is None or parts <= 1:
        return
    half = any(case.stored(parameter) == "fp16" for _, _, parameter in case.trained)
    dtype, limit = ("fp16", FP16_MAX) if half else ("fp32", FP32_MAX)
    divided = isinstance(case.model, LightningModule) and case.model.automatic_optimization
    largest = rule.init_scale * (1 if divided else parts)
    if largest < limit:
        return
    entry = f"{limit / largest:.3g}"
    undivided = "" if divided else f" where each loss is not divided by {parts}"
    yield Finding(
        name="accumulation_overflows",
        severity="warning" if rule.init_scale >= limit else "info",
        what=f"{parts} micro-batches are summed in {dtype} at a loss scale of {rule.init_scale:g}",
        why=f"{dtype} ends at {limit:g}: the sum overflows where a gradient is {entry} or more{undivided}, "
        "although the gradient of each micro-batch fits",
        fix=f"use {_starting(case, rule, _below(limit / parts))}"
        + (", or '16-mixed', whose gradients are fp32" if half else ""),
        where="accumulate_grad_batches",
    )


def _below(limit: float) -> float:
    """The power of 2 that leaves a factor of 16 below ``limit``."""
    return 2.0 ** (math.floor(math.log2(limit)) - 4)
