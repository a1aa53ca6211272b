"""A DeepSpeed JSON from a policy, for DeepSpeed alone.

What DeepSpeed would carry out with other numbers is refused; what a JSON has no key for is written into a comment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_mp.deepspeed_config.merge import add_trainer, compose, fits
from lightning_mp.deepspeed_config.read import read_policy
from lightning_mp.deepspeed_config.schema import SUBJECT, check, of_rule
from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import PrecisionPolicy

_ORDER = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16", "bf16")
_ITSELF = "run the plan itself, strategy='mp_deepspeed_zero2'"


def write_policy(policy: PrecisionPolicy, trainer: Mapping[str, Any], **sharding: Any) -> dict[str, Any]:
    """The JSON that makes DeepSpeed alone do what ``policy`` says, as far as it can.

    ``trainer`` has the keys of batch, accumulation and clipping, ``sharding`` is for ``compose``. Fields that read back
    otherwise (pins, TF32, checkpointing, ``at_min``, …) stand as lines under ``_comment``.

    Raises:
        PlanError: everything in the policy that DeepSpeed would carry out with other numbers, and bad arguments.
    """
    faults = Faults(SUBJECT)
    _check(policy, faults)
    faults.extend(check("", trainer)[1].values())
    mode = policy if policy.precision != "auto" else replace(policy, precision="32-true", loss_scaling=None)
    composed: dict[str, Any] = {}
    try:
        composed = compose(mode, **sharding)
    except PlanError as error:
        faults.extend(error.faults)
    faults.raise_if_any()
    # What a plan carries out itself in its own strategies DeepSpeed alone has to be told.
    if policy.compute_dtype == "bf16":
        composed["bf16"] = {"enabled": True, "check_grad_overflow": policy.nonfinite.action == "skip"}
    if policy.buffer_dtype is not None:
        composed["data_types"]["buffer_dtype"] = policy.buffer_dtype
    micro, steps, clip = (trainer[key] for key in _ORDER[:3])
    config = add_trainer(composed, clip_norm=clip, accumulate=steps, world_size=1, micro_batch=micro)
    without_key = _without_key(policy, read_policy(config)[0])
    ordered = {key: config[key] for key in _ORDER} | config
    return {"_comment": without_key, **ordered} if without_key else ordered


def _check(policy: PrecisionPolicy, faults: Faults) -> None:
    """Refuse what DeepSpeed does otherwise (of the scale: deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler)."""
    given, allowed = f"precision={policy.precision!r}", "'32-true', 'bf16-mixed', '16-mixed'"
    if policy.precision == "auto":
        faults.add(given, f"{allowed}: 'auto' is decided when a run starts", "write the precision")
    elif policy.storage_dtype != "fp32":
        fix = f"write {policy.precision.replace('true', 'mixed')!r}, or {_ITSELF}"
        faults.add(given, f"{allowed}: DeepSpeed's half engines keep fp32 master weights", fix)
    if policy.nonfinite.action == "raise":
        allowed = "nonfinite='skip': DeepSpeed does not stop at the first"
        faults.add("nonfinite='raise'", allowed, f"write nonfinite='skip', or {_ITSELF}")
    rule = policy.loss_scaling
    if rule is None or not rule.dynamic:
        return
    checks: Mapping[str, tuple[bool, str]] = {
        "growth_factor": (rule.growth_factor == 2, "2.0"),
        "backoff_factor": (rule.backoff_factor == 0.5, "0.5"),
        "growth_delay": (rule.growth_delay <= 1, "1, or 0"),
        "init_scale": (fits("initial_scale_power", of_rule("initial_scale_power", policy)), "a power of 2 >= 1"),
        "min_scale": (fits("min_loss_scale", rule.min_scale), "a whole number >= 1"),
        "max_scale": (rule.max_scale in (None, math.inf), "inf, or None"),
    }
    for name, (fine, allowed) in checks.items():
        if not fine:
            given = f"loss_scaling.{name}={getattr(rule, name)!r}"
            faults.add(given, f"{allowed}, which DeepSpeed does", f"write that, or {_ITSELF}")


def _without_key(policy: PrecisionPolicy, back: PrecisionPolicy) -> list[str]:
    """A line for each field that the JSON reads back otherwise."""
    wanted, found = policy.to_dict(), back.to_dict()
    wanted["pins"], found["pins"] = {pin.pattern: pin.dtype for pin in policy.pins}, {}
    lines: list[str] = []
    for field, value in wanted.items():
        there = found[field]
        if not (isinstance(value, dict) and there):
            if value != there:
                lines.append(f"{field}={value!r}: DeepSpeed's JSON has no key for it, set it in your own code")
        elif field != "loss_scaling" or value["dynamic"]:  # of a static rule nothing but the scale is read
            lines += [
                f"{field}.{part}={own!r}: DeepSpeed's JSON has no key for it, its own value is {there[part]!r}"
                for part, own in value.items()
                if own != there[part]
            ]
    return lines
