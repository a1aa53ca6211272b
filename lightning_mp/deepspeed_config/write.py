"""A DeepSpeed JSON from a policy, for DeepSpeed alone.

What DeepSpeed would carry out with other numbers is refused; what a JSON has no key for is written into a comment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightning_mp.deepspeed_config.merge import add_trainer, compose
from lightning_mp.deepspeed_config.read import read_policy
from lightning_mp.deepspeed_config.schema import SUBJECT, check
from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.loss_scaling import LossScaling

_ORDER = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "fp16", "bf16")
_ITSELF = "run the plan itself, strategy='mp_deepspeed_zero2'"


def write_policy(
    policy: PrecisionPolicy,
    *,
    stage: int,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    micro_batch: int = 1,
    accumulate: int = 1,
    clip_norm: float = 0.0,
) -> dict[str, Any]:
    """The JSON that makes DeepSpeed alone do what ``policy`` says, as far as it can.

    Fields that read back otherwise (pins, TF32, checkpointing, ``at_min``, …) stand as lines under ``_comment``.

    Raises:
        PlanError: everything in the policy that DeepSpeed would carry out with other numbers, and bad arguments.
    """
    faults = Faults(SUBJECT)
    _check_mode(policy, faults)
    if policy.loss_scaling is not None and policy.loss_scaling.dynamic:
        _check_rule(policy.loss_scaling, faults)
    trainer = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": clip_norm,
    }
    faults.extend(check("", trainer)[1].values())
    mode = policy if policy.precision != "auto" else replace(policy, precision="32-true", loss_scaling=None)
    try:
        composed = compose(
            mode,
            stage=stage,
            offload_optimizer=offload_optimizer,
            offload_parameters=offload_parameters,
        ).config
    except PlanError as error:
        faults.extend(error.faults)
        composed = dict[str, Any]()
    faults.raise_if_any()
    config = add_trainer(
        composed | _engines(policy, composed),
        clip_norm=clip_norm,
        accumulate=accumulate,
        world_size=1,
        micro_batch=micro_batch,
    )
    without_key = _without_key(policy, read_policy(config)[0])
    ordered = {key: config[key] for key in _ORDER} | config
    return {"_comment": without_key, **ordered} if without_key else ordered


def _check_mode(policy: PrecisionPolicy, faults: Faults) -> None:
    given = f"precision={policy.precision!r}"
    allowed = "'32-true', 'bf16-mixed', '16-mixed'"
    if policy.precision == "auto":
        faults.add(given, f"{allowed}: 'auto' is decided when a run starts", "write the precision")
    elif policy.storage_dtype != "fp32":
        fix = f"write {policy.precision.replace('true', 'mixed')!r}, or {_ITSELF}"
        faults.add(given, f"{allowed}: DeepSpeed's half engines keep fp32 master weights", fix)
    if policy.nonfinite.action == "raise":
        allowed = "nonfinite='skip': DeepSpeed does not stop at the first"
        faults.add("nonfinite='raise'", allowed, f"write nonfinite='skip', or {_ITSELF}")


def _check_rule(rule: LossScaling, faults: Faults) -> None:
    """Refuse what would move the scale elsewhere (deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler)."""
    mantissa, exponent = math.frexp(rule.init_scale)
    whole = rule.min_scale >= 1 and rule.min_scale == int(rule.min_scale)
    checks: tuple[tuple[str, bool, str, str], ...] = (
        ("growth_factor", rule.growth_factor == 2, "2.0, DeepSpeed's only one", "write growth_factor=2.0"),
        ("backoff_factor", rule.backoff_factor == 0.5, "0.5, DeepSpeed's only one", "write backoff_factor=0.5"),
        ("growth_delay", rule.growth_delay <= 1, "1, DeepSpeed's only one (or 0)", "write growth_delay=1"),
        ("init_scale", mantissa == 0.5 and exponent >= 1, "a power of 2 >= 1", "65536.0 is the default"),
        ("min_scale", whole, "a whole number >= 1", "write min_scale=1.0"),
        ("max_scale", rule.max_scale in (None, math.inf), "inf (or None): DeepSpeed has no ceiling", "leave it out"),
    )
    for name, fine, allowed, fix in checks:
        if not fine:
            faults.add(f"loss_scaling.{name}={getattr(rule, name)!r}", allowed, fix)


def _engines(policy: PrecisionPolicy, composed: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks that a plan carries out itself in its own strategies, and that DeepSpeed alone has to be told."""
    blocks: dict[str, Any] = {}
    if policy.compute_dtype == "bf16":
        blocks["bf16"] = {"enabled": True, "check_grad_overflow": policy.nonfinite.action == "skip"}
    if policy.buffer_dtype is not None:
        blocks["data_types"] = {**composed["data_types"], "buffer_dtype": policy.buffer_dtype}
    return blocks


def _without_key(policy: PrecisionPolicy, back: PrecisionPolicy) -> list[str]:
    """A line for each field that the JSON reads back otherwise."""
    wanted, found = policy.to_dict(), back.to_dict()
    wanted["pins"], found["pins"] = {pin.pattern: pin.dtype for pin in policy.pins}, {}
    lines: list[str] = []
    for field, value in wanted.items():
        there = found[field]
        if not (isinstance(value, dict) and there):
            lines += (
                [f"{field}={value!r}: DeepSpeed's JSON has no key for it, set it in your own code"]
                if value != there
                else []
            )
        elif field != "loss_scaling" or value["dynamic"]:  # of a static rule nothing but the scale is read
            parts = [part for part in value if value[part] != there[part]]
            lines += [
                f"{field}.{part}={value[part]!r}: DeepSpeed's JSON has no key for it, its own value is {there[part]!r}"
                for part in parts
            ]
    return lines
