"""The JSON a DeepSpeed engine gets under a plan: the user's own, merged, or every contradiction at once.

The plan runs DeepSpeed's ZeRO engines as sharders: it enters autocast, casts and scales the loss itself. So the half
precision engines (``bf16``, ``torch_autocast``) stay off, and ``fp16`` states the plan's loss scaling. For DeepSpeed
alone they are on: what it would carry out with other numbers is refused, what a JSON has no key for is a comment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, cast

from lightning_mp.deepspeed_config.read import load_json, read_policy
from lightning_mp.deepspeed_config.schema import (
    REFUSED,
    REFUSED_ENTRIES,
    RULE,
    SAYS,
    SUBJECT,
    check,
    dtype_of,
    is_off,
    loss_scale,
    of_rule,
    without_unset,
)
from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.pieces import LossScaling

_CLIP, _STEPS = "gradient_clipping", "gradient_accumulation_steps"
_BATCH, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_SENT = "communication_data_type"


def compose(
    policy: PrecisionPolicy,
    user: Mapping[str, Any] | None = None,
    *,
    stage: int,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    fp16_supported: bool = True,
) -> dict[str, Any]:
    """The engine's config for a plan, ``completed``, and a ZeRO stage, with the user's own JSON merged in.

    ``fp16_supported`` says whether DeepSpeed takes fp16 on this device; the plan computes in it either way.

    Raises:
        PlanError: every unknown key, wrong type and contradiction between JSON, plan and strategy, each with both
            values.
        ValueError: the precision is still ``"auto"``.
    """
    if policy.precision == "auto":
        raise ValueError("a DeepSpeed config needs a resolved precision, not 'auto'")
    given = without_unset(load_json(user)) if user is not None else {}
    merge = _Merge(completed(policy, given), given)
    merge.engines(fp16_supported)
    merge.dtypes()
    merge.zero(stage, {"offload_optimizer": offload_optimizer, "offload_param": offload_parameters})
    merge.faults.raise_if_any()
    return merge.config


def completed(policy: PrecisionPolicy, user: Mapping[str, Any] | None) -> PrecisionPolicy:
    """``policy`` with the loss scale of the user's JSON, where the plan has the default one, which nobody wrote."""
    block: Any = (user or {}).get("fp16")
    if policy.loss_scaling != LossScaling() or not isinstance(block, Mapping):
        return policy
    said = without_unset({key: cast("Any", block).get(key) for key in ("loss_scale", *RULE)})
    try:
        rule = read_policy({"fp16": {"enabled": True, **said}})[0].loss_scaling if said else None
    except PlanError:  # ``compose`` says what is wrong with it
        rule = None
    return policy if rule is None else replace(policy, loss_scaling=rule)


class _Merge:
    """One user's JSON on its way to the engine's; ``config`` holds what is settled."""

    def __init__(self, policy: PrecisionPolicy, user: dict[str, Any]) -> None:
        self.policy = policy
        self.faults = Faults(SUBJECT)
        for key in [key for key in user if key in REFUSED]:
            value = user.pop(key)
            if not is_off(value):
                self.faults.add(f"{key}={value!r}", f"no {key}: {REFUSED[key]}", f"remove {key} from the JSON")
        self.config, wrong = check("", user)
        self.faults.extend(wrong.values())
        for path, reason in REFUSED_ENTRIES.items():
            where, key = path.split(".")
            value = self.config.get(where, {}).pop(key, False)
            if value is not False:
                self.faults.add(f"{path}={value!r}", f"{where} without it: {reason}", f"remove {path}")
        self.config.setdefault("zero_allow_untested_optimizer", True)  # the step is the plan's, whatever the optimizer
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # offloading must not swap the user's optimizer

    def _compare(self, path: str, given: Any, key: str | None = None) -> None:
        """Note what the JSON says otherwise than the plan does, with both."""
        field, value = SAYS[key or path]
        wanted = value(self.policy)
        if wanted != given and not (isinstance(wanted, str) and dtype_of(given) == wanted):
            self._contradiction(f"{path}={given!r}", f"{field}={attrgetter(field)(self.policy)!r} in the plan")

    def _contradiction(self, given: str, otherwise: str) -> None:
        fix = f"remove {given.partition('=')[0]} from the JSON, or write the same in both"
        self.faults.add(f"{given} in the JSON and {otherwise}", "the same in both", fix)

    def engines(self, fp16_supported: bool) -> None:
        """The blocks of the half precision engines: the plan does their work; what the user wrote must agree."""
        policy = self.policy
        for name in ("bf16", "bfloat16"):
            if self.config.pop(name, {}).get("enabled"):
                self._compare(f"{name}.enabled", True, "bf16.enabled")
        block = self.config.pop("torch_autocast", {})
        if block.get("enabled") and not (policy.mixed and dtype_of(block.get("dtype")) == policy.compute_dtype):
            given = f"torch_autocast.enabled=True with dtype={block.get('dtype')!r}"
            self._contradiction(given, f"precision={policy.precision!r} in the plan")
        self.config |= {"bf16": {"enabled": False}, "torch_autocast": {"enabled": False}}
        block = self.config.pop("fp16", {})
        if "enabled" in block:
            self._compare("fp16.enabled", block["enabled"])
        if policy.compute_dtype != "fp16" or policy.loss_scaling is None:
            self.config["fp16"] = {"enabled": False}
            return
        enabled = {"enabled": fp16_supported, "auto_cast": block.get("auto_cast", False)}
        self.config["fp16"] = {**enabled, **self._scaling(block, policy.loss_scaling)}

    def _scaling(self, block: dict[str, Any], rule: LossScaling) -> dict[str, Any]:
        """The loss scale as the plan says it; what DeepSpeed has no number for is left out, and the plan does it."""
        for key in ("loss_scale", *(RULE if rule.dynamic else ())):
            if key in block:
                self._compare(f"fp16.{key}", block[key])
        written: dict[str, Any] = {"loss_scale": loss_scale(self.policy)}
        for key in RULE if rule.dynamic else ():
            value = of_rule(key, self.policy)
            if fits(key, value):
                written[key] = int(value) if key == "min_loss_scale" else value
        return written

    def dtypes(self) -> None:
        """``communication_data_type`` and ``data_types``: what gradients are sent and summed in."""
        if _SENT in self.config:
            self._compare(_SENT, self.config[_SENT])
        self.config[_SENT] = self.policy.reduce_dtype
        types = self.config.pop("data_types", {})
        for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
            # Taken out even where it agrees: the engine would cast, pins included, or refuse what is not its own mode.
            dtype = types.pop(key, None)
            if dtype is not None:
                self._compare(f"data_types.{key}", dtype)
        self.config["data_types"] = {**types, "grad_accum_dtype": "fp32"}

    def zero(self, stage: int, offload: Mapping[str, bool]) -> None:
        """``zero_optimization``: the strategy's stage and offloading, with the user's other keys."""
        zero = self.config.pop("zero_optimization", {})
        if stage not in (1, 2, 3):
            self.faults.add(f"stage={stage!r}", "1, 2, 3", "choose 'ddp' for training without shards")
        if zero.get("stage", stage) != stage:
            self._contradiction(f"zero_optimization.stage={zero['stage']!r}", f"stage={stage!r} in the strategy")
        # The deprecated flags as the blocks that took their place, which DeepSpeed refuses next to them.
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.pop(old, False):
                zero.setdefault(new, {"device": "cpu"})
        for name, wanted in offload.items():
            if wanted and zero.get(name, {}).get("device") == "none":
                given = f"zero_optimization.{name}.device='none'"
                self._contradiction(given, f"{name.replace('param', 'parameters')}=True in the strategy")
            if wanted:
                zero[name] = {"device": "cpu", **zero.get(name, {})}
        if stage in (1, 2) and zero.get("offload_param", {}).get("device", "none") != "none":
            self.faults.add(f"offload_param with stage={stage}", "offloaded parameters at stage 3", "choose stage 3")
        self.config["zero_optimization"] = {**zero, "stage": stage}


def fits(key: str, value: Any) -> bool:
    """Whether DeepSpeed takes a value of a dynamic scale (precision_config.DeepSpeedFP16Config)."""
    if key == "initial_scale_power":
        return value is not None and value >= 0
    return key != "min_loss_scale" or (value == int(value) and value >= 1)


def add_trainer(
    config: Mapping[str, Any],
    *,
    clip_norm: float | None,
    accumulate: int,
    world_size: int,
    micro_batch: int | None,
) -> dict[str, Any]:
    """A copy of a config with what the Trainer decides: clipping, accumulation and the batch.

    ``micro_batch`` is the dataloader's batch size, ``None`` where it is not known. Clipping that stands in the JSON
    alone is kept, and the caller clips by it.

    Raises:
        PlanError: every value that JSON and Trainer give differently, with both.
    """
    merged = without_unset(config)
    own, wrong = check("", {key: merged[key] for key in (_CLIP, _STEPS, _BATCH, _MICRO) if key in merged})
    faults = Faults(SUBJECT)
    faults.extend(wrong.values())
    trainer = (
        (_CLIP, clip_norm, "Trainer(gradient_clip_val={})"),
        (_STEPS, accumulate, "Trainer(accumulate_grad_batches={})"),
        (_MICRO, micro_batch, "a dataloader with batch_size={}"),
    )
    for key, value, words in trainer:
        if key in own and value is not None and own[key] != value:
            given = f"{key}={own[key]!r} in the JSON and {words.format(repr(value))}"
            faults.add(given, "the same in both", f"write {words.format(own[key])}, or remove {key} from the JSON")
    merged[_CLIP] = own.get(_CLIP, 0.0 if clip_norm is None else clip_norm)  # left out, DeepSpeed would clip at 1.0
    merged[_STEPS] = int(own.get(_STEPS, accumulate))
    merged[_MICRO] = _micro(own, micro_batch, merged[_STEPS] * world_size)
    product = merged[_MICRO] * merged[_STEPS] * world_size
    if own.get(_BATCH, product) != product:
        factors = f"{merged[_MICRO]} a device x {merged[_STEPS]} accumulated x {world_size} devices = {product}"
        fix = f"write {_BATCH}: {product}, or leave it out"
        faults.add(f"{_BATCH}={own[_BATCH]!r} in the JSON and {factors}", "their product", fix)
    faults.raise_if_any()
    return merged


def _micro(own: Mapping[str, Any], micro_batch: int | None, parts: int) -> int:
    if _MICRO in own or micro_batch is not None:
        return int(own.get(_MICRO, micro_batch))
    whole = int(own.get(_BATCH, parts))  # alone, the whole batch says what a part of it is
    return whole // parts if whole % parts == 0 else 1


def over(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``, with what it leaves out taken from ``defaults``, block by block."""
    merged = dict(defaults)
    for key, value in config.items():
        below = merged.get(key)
        merged[key] = over(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


# ---------------------------------------------------------------------- for DeepSpeed alone

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
