"""What a policy declares, in words, subject by subject."""

from __future__ import annotations

from math import inf, log2

from lightning_mp.policy.fp8 import FP8
from lightning_mp.policy.nonfinite import NonFinite
from lightning_mp.policy.precision_policy import Checkpointing, PrecisionPolicy


def storage(policy: PrecisionPolicy) -> str:
    """What parameters, buffers and optimizer state are stored in."""
    stored, buffers = policy.storage_dtype, policy.buffer_dtype
    if buffers is None:
        buffers = f"floating ones {stored}" if stored != "fp32" else "as the model has them"
    return f"parameters, gradients and optimizer state {stored}; buffers {buffers}"


def compute(policy: PrecisionPolicy) -> str:
    """What forward and backward run in."""
    if policy.precision == "auto":
        return "chosen for the device when the run begins"
    if policy.mixed:
        fp8 = "" if policy.fp8 is None else ", fp8 where converted"
        return f"matrix products and convolutions {policy.compute_dtype}{fp8}, the rest as torch.autocast decides"
    return f"everything {policy.compute_dtype}"


def fp8(rule: FP8) -> str:
    """Which linear layers multiply in FP8, by which recipe, and when."""
    parts = [f"products of {', '.join(rule.patterns)}"]
    if rule.skip:
        parts.append(f"except {', '.join(rule.skip)}")
    if rule.small == "skip":
        parts.append("except layers too small to pay")
    when = "evaluation in bf16" if rule.evaluate == "bf16" else "evaluation in fp8 too"
    gathered = "; weights gathered in fp8" if rule.all_gather else ""
    return f"{rule.recipe}: {', '.join(parts)}; {when}{gathered}{'; emulated' if rule.emulate else ''}"


def loss_scaling(policy: PrecisionPolicy) -> str:
    """The rule of the loss scale."""
    rule = policy.loss_scaling
    if rule is None:
        return "torch's rule, where the mode is fp16" if policy.precision == "auto" else "none"
    if not rule.dynamic:
        return f"{power(rule.init_scale)}, fixed; a step that overflows is skipped"
    overflows = "an overflow" if rule.hysteresis == 1 else f"{rule.hysteresis} overflows"
    in_a_row = " in a row" if rule.consecutive_hysteresis and rule.hysteresis > 1 else ""
    floor = {"hold": "held there", "raise": "an overflow there raises"}[rule.at_min]
    bounds = f"; at least {power(rule.min_scale)}, {floor}" if rule.min_scale else ""
    if rule.max_scale not in (None, inf):
        bounds += f"; at most {power(rule.max_scale)}"
    return (
        f"{power(rule.init_scale)} at first, x{rule.growth_factor:g} after {rule.growth_interval} clean steps, "
        f"x{rule.backoff_factor:g} after {overflows}{in_a_row}{bounds}"
    )


def power(value: float) -> str:
    """A scale as people say it: ``2^16``; other numbers as they are."""
    exponent = log2(value) if value > 0 else 0.5
    return f"2^{exponent:.0f}" if exponent.is_integer() and abs(exponent) >= 10 else f"{value:g}"


def nonfinite(rule: NonFinite) -> str:
    """What a step with a non-finite gradient leads to."""
    then = "raise" if rule.on_budget == "raise" else "bring the last good checkpoint back"
    done = {
        "skip": f"the step is skipped; more than {rule.max_consecutive} in a row {then}",
        "raise": "the first one raises",
        "ignore": "the step is applied, as in stock Lightning",
    }[rule.action]
    return f"{done}; its batch is saved" if rule.save_batch else done


def tf32(policy: PrecisionPolicy) -> str:
    """TF32 for fp32 matrix products."""
    on = {"high": "on", "medium": "on, bf16 where the device prefers it", "highest": "off"}
    return "torch's own setting" if policy.tf32 is None else f"{on[policy.tf32]} ({policy.tf32!r})"


def checkpointing(rule: Checkpointing | None) -> str:
    """Which modules recompute their activations."""
    if rule is None:
        return "none"
    ordinal = {2: "2nd", 3: "3rd"}.get(rule.every, f"{rule.every}th")
    every = f"every {ordinal} of " if rule.every > 1 else ""
    kept = "" if rule.mode == "full" else ", matrix products and attention kept"
    if rule.save_ops is not None:
        kept = f", {', '.join(rule.save_ops)} kept"
    return f"{every}{', '.join(rule.patterns)}{kept}"
