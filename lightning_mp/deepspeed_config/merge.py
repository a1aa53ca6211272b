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
from lightning_mp.deepspeed_config.schema import (
    REFUSED,
    RULE,
    SAYS,
    SUBJECT,
    check,
    dtype_of,
    is_off,
    json_value,
    without_unset,
)
from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import PrecisionPolicy
from lightning_mp.policy.loss_scaling import LossScaling

_CLIP, _STEPS = "gradient_clipping", "gradient_accumulation_steps"
_BATCH, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_SENT = "communication_data_type"
_FLAGS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
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
#: fields of a loss scale no key says, and what DeepSpeed does (deepspeed/runtime/fp16/loss_scaler.py)
_NO_KEY: Mapping[str, Any] = {
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_delay": 1,
    "max_scale": math.inf,
    "at_min": "raise",
}


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
    merge.engines(fp16_supported)
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
        for key in [key for key in user if key in REFUSED]:
            value = user.pop(key)
            if is_off(value):
                self.notes.append(f"{key}={value!r}: taken out, it is off")
            else:
                self.faults.add(f"{key}={value!r}", f"no {key}: {REFUSED[key]}", f"remove {key} from the JSON")
        self.config, wrong = check("", user)
        self.faults.extend(wrong.values())
        for path, reason in _REFUSED_ENTRIES.items():
            where, key = path.split(".")
            value = self.config.get(where, {}).pop(key, False)
            if value is not False:
                self.faults.add(f"{path}={value!r}", f"{where} without it: {reason}", f"remove {path}")
        self.config.setdefault("zero_allow_untested_optimizer", True)  # the step is the plan's, whatever the optimizer
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)  # offloading must not swap the user's optimizer

    def _agrees(self, path: str, given: Any, key: str | None = None) -> bool:
        """Whether the JSON says what the plan does; what it says otherwise is noted with both."""
        says = SAYS[key or path]
        wanted = says.value(self.policy)
        if wanted == given or (isinstance(wanted, str) and dtype_of(given) == wanted):
            return True
        shown = f"{given!r} (2**{given})" if path == "fp16.initial_scale_power" else repr(given)
        fix = f"remove {path} from the JSON, or set {says.same(given)}"
        self._contradiction(f"{path}={shown}", f"{says.words(self.policy)} in the plan", fix)
        return False

    def _contradiction(self, given: str, otherwise: str, fix: str) -> None:
        self.faults.add(f"{given} in the JSON and {otherwise}", "the same in both", fix)

    def _taken_out(self, where: str, block: Mapping[str, Any], reason: str) -> None:
        if block:
            given = ", ".join(f"{where}.{key}={value!r}" for key, value in block.items())
            self.notes.append(f"{given}: taken out, {reason}")

    def engines(self, fp16_supported: bool) -> None:
        """The blocks of the half precision engines: the plan does their work; what the user wrote must agree."""
        policy, does = self.policy, f"the plan's precision={self.policy.precision!r}"
        for name in ("bf16", "bfloat16"):
            block = self.config.pop(name, {})
            if block.pop("enabled", False) and self._agrees(f"{name}.enabled", True, "bf16.enabled"):
                self._taken_out(name, {"enabled": True}, f"{does} computes in bf16 itself")
            self._taken_out(name, block, "the bf16 engine is off")
        block = self.config.pop("torch_autocast", {})
        if block.get("enabled"):
            dtype = block.get("dtype")
            given = f"torch_autocast.enabled=True with dtype={dtype!r}"
            if policy.mixed and dtype_of(dtype) == policy.compute_dtype:
                self.notes.append(f"{given}: taken out, {does} enters autocast itself")
            else:
                fix = "set torch_autocast.enabled to false, or its dtype and the plan's precision to the same '-mixed'"
                self._contradiction(given, f"precision={policy.precision!r} in the plan", fix)
        self.config |= {"bf16": {"enabled": False}, "torch_autocast": {"enabled": False}}
        block = self.config.pop("fp16", {})
        if "enabled" in block:
            self._agrees("fp16.enabled", block.pop("enabled"))
        if policy.compute_dtype != "fp16" or policy.loss_scaling is None:
            self._taken_out("fp16", block, f"{does} has no loss scale")
            self.config["fp16"] = {"enabled": False}
            return
        if not fp16_supported:
            self.notes.append("fp16.enabled=False: DeepSpeed refuses this device, and the plan computes in fp16 itself")
        auto_cast = block.pop("auto_cast", False)
        if auto_cast:
            self.notes.append("fp16.auto_cast=True: the engine casts floating inputs to fp16 before the forward")
        scaling = self._scaling(block, policy.loss_scaling)
        self.config["fp16"] = {"enabled": fp16_supported, "auto_cast": auto_cast, **scaling}

    def _scaling(self, block: dict[str, Any], rule: LossScaling) -> dict[str, Any]:
        """The loss scale as the plan says it, with a note on what DeepSpeed has no number or no key for."""
        if "loss_scale" in block:
            self._agrees("fp16.loss_scale", block.pop("loss_scale"))
        if not rule.dynamic:
            self._taken_out("fp16", block, "the plan's loss scale is static and DeepSpeed reads none of them")
        for key in RULE if rule.dynamic else ():
            if key in block:
                self._agrees(f"fp16.{key}", block[key])
        written: dict[str, Any] = {"loss_scale": SAYS["fp16.loss_scale"].value(self.policy)}
        for key, (field, _) in RULE.items():
            own = getattr(rule, field)
            value = json_value(key, own)
            if fits(key, value, rule.dynamic):
                written[key] = int(value) if key == "min_loss_scale" else value
            else:
                needs = "a power of 2 >= 1" if key == "initial_scale_power" else "a whole number >= 1"
                why = f"the plan's loss_scaling.{field}={own!r} is none, and applies all the same"
                self.notes.append(f"fp16.{key}: left out, DeepSpeed takes {needs}; {why}")
        unsaid = {field: getattr(rule, field) for field in _NO_KEY} if rule.dynamic else {}
        given = ", ".join(f"{field}={value!r}" for field, value in unsaid.items() if value != _NO_KEY[field])
        if given:
            note = f"loss_scaling: DeepSpeed's JSON has no key for {given}; the plan's rule carries them out"
            self.notes.append(note)
        return written

    def dtypes(self) -> None:
        """``communication_data_type`` and ``data_types``: what gradients are sent and summed in."""
        if _SENT in self.config:
            self._agrees(_SENT, self.config[_SENT])
        self.config[_SENT] = self.policy.reduce_dtype
        types = self.config.pop("data_types", {})
        for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
            # Taken out even where it agrees: the engine would cast, pins included, or refuse what is not its own mode.
            dtype = types.pop(key, None)
            if dtype is not None and self._agrees(f"data_types.{key}", dtype) and key != "grad_accum_dtype":
                self._taken_out("data_types", {key: dtype}, "the plan stores in it itself")
        self.config["data_types"] = {**types, "grad_accum_dtype": "fp32"}

    def zero(self, stage: int, offload: Mapping[str, bool]) -> None:
        """``zero_optimization``: the strategy's stage and offloading, with the user's other keys."""
        zero = self.config.pop("zero_optimization", {})
        if stage not in (1, 2, 3):
            self.faults.add(f"stage={stage!r}", "1, 2, 3", "choose 'ddp' for training without shards")
        if zero.get("stage", stage) != stage:
            self._against_strategy(f"zero_optimization.stage={zero['stage']!r}", f"stage={stage!r}")
        # The deprecated flags as the blocks that took their place, which DeepSpeed refuses next to them.
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
            if zero.pop(old, False) and new not in zero:
                zero[new] = {"device": "cpu"}
                self.notes.append(f"zero_optimization.{old}=True: written as {new}, which took its place")
        for name, wanted in offload.items():
            self._offload(zero, name, wanted, stage)
        self.config["zero_optimization"] = {**zero, "stage": stage}

    def _against_strategy(self, given: str, chosen: str) -> None:
        fix = "remove it from the JSON, or choose the strategy that says the same"
        self._contradiction(given, f"{chosen} in the strategy", fix)

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


def fits(key: str, value: Any, dynamic: bool) -> bool:
    """Whether DeepSpeed takes a value (precision_config.DeepSpeedFP16Config); it does not look at a static floor."""
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
