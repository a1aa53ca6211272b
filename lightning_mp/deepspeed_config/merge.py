"""The JSON a DeepSpeed engine gets under a plan: the user's own, merged, or every contradiction at once.

The plan runs DeepSpeed's ZeRO engines as sharders: it enters autocast, casts and scales the loss itself. So the half
precision engines (``bf16``, ``torch_autocast``) stay off, and ``fp16`` states the plan's loss scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from lightning_mp.deepspeed_config.read import load_json, read_policy
from lightning_mp.deepspeed_config.schema import REFUSED, RULE, SUBJECT, check, dtype_of, is_off, without_unset
from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.loss_scaling import LossScaling

_CLIP, _STEPS = "gradient_clipping", "gradient_accumulation_steps"
_BATCH, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_FLAGS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}


@dataclass(frozen=True, slots=True)
class Composed:
    """What the engine gets, and one line for everything that the plan carries out instead or JSON cannot say."""

    config: dict[str, Any]
    notes: tuple[str, ...]


def compose(
    policy: PrecisionPolicy,
    user: Mapping[str, Any] | None = None,
    *,
    stage: int,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    fp16_supported: bool = True,
) -> Composed:
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
    merge.engines()
    merge.fp16(fp16_supported)
    merge.dtypes()
    merge.zero(stage, {"offload_optimizer": offload_optimizer, "offload_param": offload_parameters})
    merge.faults.raise_if_any()
    return Composed(merge.config, tuple(merge.notes))


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
        self.notes: list[str] = []
        self.config, wrong = check("", self._without_refused(user))
        self.faults.extend(wrong.values())
        for path, reason in _REFUSED_ENTRIES.items():
            where, key = path.split(".")
            value = self.config.get(where, {}).pop(key, False)
            if value is not False:
                self.faults.add(f"{path}={value!r}", f"{where} without it: {reason}", f"remove {path}")
        self.config.setdefault("zero_allow_untested_optimizer", True)  # the step is the plan's, whatever the optimizer
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # offloading must not swap the user's optimizer

    def _without_refused(self, user: dict[str, Any]) -> dict[str, Any]:
        for key in [key for key in user if key in REFUSED]:
            value = user.pop(key)
            if is_off(value):
                self.notes.append(f"{key}={value!r}: taken out, it is off")
            else:
                self.faults.add(f"{key}={value!r}", f"no {key}: {REFUSED[key]}", f"remove {key} from the JSON")
        return user

    def contradiction(self, given: str, planned: str, fix: str) -> None:
        """Note that the JSON says one thing and the plan another."""
        self.faults.add(f"{given} in the JSON and {planned} in the plan", "the same in both", fix)

    @property
    def _precision(self) -> str:
        return f"precision={self.policy.precision!r}"

    # --- who computes in half precision ---------------------------------------------------------------------------

    def engines(self) -> None:
        """``bf16`` and ``torch_autocast``: off, since the plan does both; what the user wrote must agree with it."""
        for name in ("bf16", "bfloat16"):
            self._bf16(name, self.config.pop(name, {}))
        self._autocast(self.config.pop("torch_autocast", {}))
        self.config["bf16"] = {"enabled": False}
        self.config["torch_autocast"] = {"enabled": False}

    def _bf16(self, name: str, block: dict[str, Any]) -> None:
        enabled = block.pop("enabled", False)
        if enabled and not self.policy.precision.startswith("bf16"):
            fix = f"set {name}.enabled to false, or precision to 'bf16-mixed'"
            self.contradiction(f"{name}.enabled=True", self._precision, fix)
        elif enabled:
            self._taken_out(name, {"enabled": True}, f"the plan's {self._precision} computes in bf16 itself")
        self._taken_out(name, block, "the bf16 engine is off")

    def _autocast(self, block: dict[str, Any]) -> None:
        enabled, dtype = block.pop("enabled", False), block.pop("dtype", None)
        given = f"torch_autocast.enabled={enabled} with dtype={dtype!r}"
        if enabled and not (self.policy.mixed and dtype_of(dtype) == self.policy.compute_dtype):
            fix = "set torch_autocast.enabled to false, or its dtype and the plan's precision to the same '-mixed'"
            self.contradiction(given, self._precision, fix)
        elif enabled:
            self.notes.append(f"{given}: taken out, the plan's {self._precision} enters autocast itself")

    def _taken_out(self, where: str, block: Mapping[str, Any], reason: str) -> None:
        if block:
            given = ", ".join(f"{where}.{key}={value!r}" for key, value in block.items())
            self.notes.append(f"{given}: taken out, {reason}")

    # --- the loss scale -------------------------------------------------------------------------------------------

    def fp16(self, supported: bool) -> None:
        """The whole ``fp16`` block as the plan says it; what the user wrote must agree with it."""
        block = self.config.pop("fp16", {})
        rule, enabled = self.policy.loss_scaling, block.pop("enabled", None)
        half = self.policy.compute_dtype == "fp16"
        if enabled is not None and enabled != half:
            fix = f"set fp16.enabled to {str(half).lower()}, or precision to {'32-true' if half else '16-mixed'!r}"
            self.contradiction(f"fp16.enabled={enabled}", self._precision, fix)
        if not half or rule is None:
            self._taken_out("fp16", block, f"the plan's {self._precision} has no loss scale")
            self.config["fp16"] = {"enabled": False}
            return
        if not supported:
            self.notes.append("fp16.enabled=False: DeepSpeed refuses this device, and the plan computes in fp16 itself")
        auto_cast = block.pop("auto_cast", False)
        if auto_cast:
            self.notes.append("fp16.auto_cast=True: the engine casts floating inputs to fp16 before the forward")
        self._scaling(block, rule)
        self.config["fp16"] = {"enabled": supported, "auto_cast": auto_cast, **self._scaling_block(rule)}

    def _scaling(self, block: dict[str, Any], rule: LossScaling) -> None:
        scale = block.pop("loss_scale", None)
        planned = 0 if rule.dynamic else rule.init_scale
        if scale is not None and scale != planned:
            what = "a dynamic loss scale" if rule.dynamic else "a static loss scale"
            built = "LossScaling()" if scale == 0 else f"LossScaling.static({scale!r})"
            fix = f"remove fp16.loss_scale from the JSON, or set loss_scaling={built}"
            self.contradiction(f"fp16.loss_scale={scale!r}", f"{what}, fp16.loss_scale={planned!r},", fix)
        if not rule.dynamic:
            self._taken_out("fp16", block, "the plan's loss scale is static and DeepSpeed reads none of them")
            return
        for key, (field, _) in RULE.items():
            if key in block and block[key] != _json_value(key, getattr(rule, field)):
                given, value = _user_value(key, block[key])
                fix = f"remove fp16.{key} from the JSON, or set LossScaling({field}={value})"
                self.contradiction(f"fp16.{key}={given}", f"loss_scaling.{field}={getattr(rule, field)!r}", fix)

    def _scaling_block(self, rule: LossScaling) -> dict[str, Any]:
        block: dict[str, Any] = {"loss_scale": 0 if rule.dynamic else rule.init_scale}
        for key, (field, _) in RULE.items():
            value = _json_value(key, getattr(rule, field))
            if _fits(key, value, rule.dynamic):
                block[key] = int(value) if key == "min_loss_scale" else value
            else:
                needs = "a power of 2 >= 1" if key == "initial_scale_power" else "a whole number >= 1"
                own = f"the plan's loss_scaling.{field}={getattr(rule, field)!r} is none, and applies all the same"
                self.notes.append(f"fp16.{key}: left out, DeepSpeed takes {needs}; {own}")
        without_key = [
            f"{field}={getattr(rule, field)!r}"
            for field, value in _NO_KEY.items()
            if rule.dynamic and getattr(rule, field) != value
        ]
        if without_key:
            given = ", ".join(without_key)
            self.notes.append(
                f"loss_scaling: DeepSpeed's JSON has no key for {given}; the plan's rule carries them out"
            )
        return block

    # --- formats and shards ---------------------------------------------------------------------------------------

    def dtypes(self) -> None:
        """``communication_data_type`` and ``data_types``: what gradients are sent and summed in."""
        reduce = self.policy.reduce_dtype
        sent = str(self.config.get("communication_data_type", reduce))
        if sent.lower() != reduce:
            fix = "remove communication_data_type from the JSON, or set the plan's reduce_dtype"
            self.contradiction(f"communication_data_type={sent!r}", f"reduce_dtype={reduce!r}", fix)
        self.config["communication_data_type"] = reduce
        types = self.config.pop("data_types", {})
        stored, buffers = self.policy.storage_dtype, self.policy.buffer_dtype
        planned: dict[str, tuple[str | None, str]] = {
            "grad_accum_dtype": ("fp32", "gradients accumulated in 'fp32'"),
            "param_dtype": (stored, f"{self._precision}, stored as {stored!r},"),
            "buffer_dtype": (buffers, f"buffer_dtype={buffers!r}"),
        }
        for key in [key for key in planned if key in types]:
            # Taken out even where it agrees: the engine would cast, pins included, or refuse what is not its own mode.
            dtype, (wanted, words) = types.pop(key), planned[key]
            if dtype_of(dtype) != wanted:
                fix = f"remove data_types.{key} from the JSON, or change the plan"
                self.contradiction(f"data_types.{key}={dtype!r}", words, fix)
            elif key != "grad_accum_dtype":
                self._taken_out("data_types", {key: dtype}, "the plan stores in it itself")
        self.config["data_types"] = {**types, "grad_accum_dtype": "fp32"}

    def zero(self, stage: int, offload: Mapping[str, bool]) -> None:
        """``zero_optimization``: the strategy's stage and offloading, with the user's other keys."""
        zero = self.config.pop("zero_optimization", {})
        if stage not in (1, 2, 3):
            self.faults.add(f"stage={stage!r}", "1, 2, 3", "choose 'ddp' for training without shards")
        if "stage" in zero and zero["stage"] != stage:
            self._against_strategy(f"zero_optimization.stage={zero['stage']!r}", f"stage={stage!r}")
        self._modernise(zero)
        for name, wanted in offload.items():
            self._offload(zero, name, wanted, stage)
        self.config["zero_optimization"] = {**zero, "stage": stage}

    def _against_strategy(self, given: str, chosen: str) -> None:
        fix = "remove it from the JSON, or choose the strategy that says the same"
        self.faults.add(f"{given} in the JSON and {chosen} in the strategy", "the same in both", fix)

    def _modernise(self, zero: dict[str, Any]) -> None:
        """Write the deprecated flags as the blocks that took their place, which DeepSpeed refuses beside them."""
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.pop(old, False) and new not in zero:
                zero[new] = {"device": "cpu"}
                self.notes.append(f"zero_optimization.{old}=True: written as {new}, which took its place")

    def _offload(self, zero: dict[str, Any], name: str, wanted: bool, stage: int) -> None:
        where, given = f"zero_optimization.{name}", name in zero
        block: dict[str, Any] = zero.pop(name, {})
        if wanted and block.get("device") == "none":
            self._against_strategy(f"{where}.device='none'", f"{_FLAGS[name]}=True")
        if wanted:
            block = {"device": "cpu", **block}
        if wanted or given:
            zero[name] = block
        if name == "offload_param" and stage in (1, 2) and block.get("device", "none") != "none":
            given_as = f"{_FLAGS[name]}=True" if wanted else f"{where}={block!r}"
            self.faults.add(f"{given_as} with stage={stage}", "offloaded parameters at stage 3", "choose stage 3")


_MASTERS = "the plan's precision says what is stored: fp32 under the '-mixed' modes, the half format under '-true'"
#: entries that would choose formats instead of the plan
_REFUSED_ENTRIES: Mapping[str, str] = {
    "fp16.fp16_master_weights_and_grads": _MASTERS,
    **{f"{name}.bf16_master_weights_and_grads": _MASTERS for name in ("bf16", "bfloat16")},
    **{f"{name}.bf16_optimizer_states": _MASTERS for name in ("bf16", "bfloat16")},
    "torch_autocast.lower_precision_safe_modules": (
        "the plan enters PyTorch's own autocast; pins={pattern: dtype} chooses the format of a module"
    ),
}
#: fields no key says, and what DeepSpeed does (deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler)
_NO_KEY: Mapping[str, Any] = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_delay": 1,
    "max_scale": math.inf,
    "at_min": "raise",
}


def _json_value(key: str, value: Any) -> Any:
    """A field of the plan as the key says it; the power of 2 is ``None`` where there is none."""
    if key != "initial_scale_power":
        return value
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else None


def _user_value(key: str, value: Any) -> tuple[str, str]:
    """A key's value as a message shows it, and the field that would say the same."""
    return (f"{value!r} (2**{value})", f"2**{value}") if key == "initial_scale_power" else (repr(value), repr(value))


def _fits(key: str, value: Any, dynamic: bool) -> bool:
    # DeepSpeed's own ranges: precision_config.DeepSpeedFP16Config; a static scale's floor is not looked at.
    if key == "initial_scale_power":
        return value is not None and value >= 0
    return key != "min_loss_scale" or (value == int(value) and (value >= 1 or not dynamic))


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
