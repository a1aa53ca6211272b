"""The JSON a DeepSpeed engine gets under a plan: the user's own, merged, or every contradiction at once.

The plan runs DeepSpeed's ZeRO engines as sharders: it enters autocast, casts and scales the loss itself. So the half
precision engines (``bf16``, ``torch_autocast``) stay off, and ``fp16`` states the plan's loss scaling. For DeepSpeed
alone they are on: what it would carry out with other numbers is refused, what a JSON has no key for is a comment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lightning_mp.deepspeed import read
from lightning_mp.deepspeed.read import (
    RULE,
    SENT,
    SENT_BESIDE_SEQUENCES,
    SUBJECT,
    DeepSpeedNotes,
    check,
    is_unset,
)
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.policy import LossScaling, PrecisionPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

_CLIP, _STEPS = "gradient_clipping", "gradient_accumulation_steps"
_BATCH, _MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
_OFF = {"enabled": False}


def without_unset(value: Any) -> Any:
    """A deep copy without comments (``_...``) and what is unset; ``optimizer`` and ``scheduler`` stay as they are."""
    if isinstance(value, (list, tuple)):
        return [*map(without_unset, cast("list[Any]", value))]
    if not isinstance(value, Mapping):
        return value
    return {
        key: deepcopy(item) if key in ("optimizer", "scheduler") else without_unset(item)
        for key, item in cast("Mapping[Any, Any]", value).items()
        if not is_unset(item) and not str(key).startswith("_")
    }


def over(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """``config``, with what it leaves out taken from ``defaults``, block by block."""
    merged = dict(defaults)
    for key, value in config.items():
        below = merged.get(key)
        merged[key] = over(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def completed(policy: PrecisionPolicy, user: Mapping[str, Any] | None) -> PrecisionPolicy:
    """``policy`` with the loss scale of the user's JSON, where the plan has the default one, which nobody wrote."""
    block: Any = (user or {}).get("fp16")
    if policy.loss_scaling != LossScaling() or not isinstance(block, Mapping):
        return policy
    said = check("fp16", without_unset(block))[0]  # ``compose`` says what is wrong with it
    rule = read.read_rule(said, Faults()) if said.keys() & {"loss_scale", *RULE} else None
    return policy if rule is None else replace(policy, loss_scaling=rule)


def compose(
    policy: PrecisionPolicy,
    user: Mapping[str, Any] | None,
    faults: Faults,
    *,
    stage: int,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
    fp16_supported: bool = True,
) -> dict[str, Any]:
    """The engine's config for a plan of a resolved precision, ``completed``, and a ZeRO stage, with the user's JSON.

    Every unknown key, wrong type and contradiction between JSON, plan and strategy is noted, with both values.
    ``fp16_supported`` says whether DeepSpeed takes fp16 on this device; the plan computes in it either way.
    """
    given = without_unset(user or {})
    policy = completed(policy, given)
    config, wrong = check("", given)
    faults.extend(wrong.values())
    _compare(policy, config, faults)
    offload = {"offload_optimizer": offload_optimizer, "offload_param": offload_parameters}
    zero = _zero(config.get("zero_optimization", {}), stage, offload, faults)
    fp16: dict[str, Any] = _OFF
    if policy.compute_dtype == "fp16" and policy.loss_scaling is not None:
        auto_cast = config.get("fp16", {}).get("auto_cast", False)
        fp16 = {"enabled": fp16_supported, "auto_cast": auto_cast, **_said(policy.loss_scaling)}
    # What agrees is taken out too: the engine would cast, pins included, or refuse what is not its own mode.
    types = {key: value for key, value in config.get("data_types", {}).items() if not key.endswith("_dtype")}
    return {
        "zero_allow_untested_optimizer": True,  # the step is the plan's, whatever the optimizer
        "zero_force_ds_cpu_optimizer": False,  # offloading must not swap the user's optimizer
        **config,
        "bf16": {**_OFF},
        "torch_autocast": {**_OFF},
        "fp16": {**fp16},
        SENT: policy.reduce_dtype,
        "data_types": {**types, "grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
    }


def _compare(policy: PrecisionPolicy, config: Mapping[str, Any], faults: Faults) -> None:
    """Note every key that says otherwise than the plan does, with both values."""
    blocks = {name: config.get(name, {}) for name in ("fp16", "bf16", "torch_autocast", "data_types")}
    autocast = read.dtype_of(blocks["torch_autocast"].get("dtype"))
    #: the plan's field, and what a key may say under it
    rows: dict[str, tuple[str, tuple[Any, ...]]] = {
        "fp16.enabled": ("precision", (policy.compute_dtype == "fp16",)),
        "bf16.enabled": ("precision", (False, policy.precision.startswith("bf16"))),
        "torch_autocast.enabled": ("precision", (False, policy.mixed and autocast == policy.compute_dtype)),
        SENT: ("reduce_dtype", (policy.reduce_dtype,)),
        SENT_BESIDE_SEQUENCES: ("reduce_dtype", (policy.reduce_dtype,)),
        "data_types.grad_accum_dtype": ("precision", ("fp32",)),
        "data_types.param_dtype": ("precision", (policy.storage_dtype,)),
        "data_types.buffer_dtype": ("buffer_dtype", (policy.buffer_dtype,)),
    }
    rule = policy.loss_scaling if policy.compute_dtype == "fp16" else None
    if rule is not None:
        rows["fp16.loss_scale"] = ("loss_scaling", (0 if rule.dynamic else rule.init_scale,))
        said = read.read_rule(blocks["fp16"], faults)
        for key, field in RULE.items() if said is not None and said.dynamic and rule.dynamic else ():
            same = getattr(said, field) == getattr(rule, field)
            rows[f"fp16.{key}"] = (f"loss_scaling.{field}", (blocks["fp16"].get(key),) if same else ())
    for path, (field, allowed) in rows.items():
        block, _, key = path.rpartition(".")
        value = (blocks[block] if block else config).get(key)
        if value is not None and value not in allowed and read.dtype_of(value) not in allowed:
            _contradiction(f"{path}={value!r}", f"{field}={attrgetter(field)(policy)!r} in the plan", faults)


def _contradiction(given: str, otherwise: str, faults: Faults) -> None:
    fix = f"remove {given.partition('=')[0]} from the JSON, or write the same in both"
    faults.add(f"{given} in the JSON and {otherwise}", fix=fix)


def _said(rule: LossScaling) -> dict[str, Any]:
    """The keys that say a loss scale; what DeepSpeed has no number for is left out, and the plan does it."""
    if not rule.dynamic:
        return {"loss_scale": rule.init_scale}
    written: dict[str, Any] = {"loss_scale": 0, **{key: getattr(rule, field) for key, field in RULE.items()}}
    mantissa, exponent = math.frexp(rule.init_scale)
    written["initial_scale_power"] = exponent - 1
    if mantissa != 0.5 or exponent < 1:
        del written["initial_scale_power"]
    written["min_loss_scale"] = int(rule.min_scale)
    if rule.min_scale < 1 or rule.min_scale != int(rule.min_scale):  # as precision_config.DeepSpeedFP16Config
        del written["min_loss_scale"]
    return written


def _zero(zero: dict[str, Any], stage: int, offload: Mapping[str, bool], faults: Faults) -> dict[str, Any]:
    """``zero_optimization``: the strategy's stage and offloading, with the user's other keys."""
    if stage not in (1, 2, 3):
        faults.add(f"stage={stage!r}", allowed="1, 2, 3", fix="choose 'ddp' for training without shards")
    if zero.get("stage", stage) != stage:
        _contradiction(f"zero_optimization.stage={zero['stage']!r}", f"stage={stage!r} in the strategy", faults)
    # The deprecated flags as the blocks that took their place, which DeepSpeed refuses next to them.
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if zero.pop(old, False):
            zero.setdefault(new, {"device": "cpu"})
    for name in [name for name, wanted in offload.items() if wanted]:
        if zero.get(name, {}).get("device") == "none":
            given = f"zero_optimization.{name}.device='none'"
            _contradiction(given, f"{name.replace('param', 'parameters')}=True in the strategy", faults)
        zero[name] = {"device": "cpu", **zero.get(name, {})}
    if stage in (1, 2) and zero.get("offload_param", {}).get("device", "none") != "none":
        faults.add(f"offload_param with stage={stage}, which keeps parameters whole", fix="choose stage 3")
    return {**zero, "stage": stage}


def add_trainer(
    config: Mapping[str, Any], faults: Faults, *, clip_norm: float | None, accumulate: int, world_size: int
) -> dict[str, Any]:
    """A copy of a config with what the Trainer decides: clipping, accumulation and the batch.

    ``config`` is a composed one. Every value that JSON and Trainer give differently is noted, with both. Clipping that
    stands in the JSON alone is kept, and the caller clips by it.
    """
    own = without_unset(config)
    for key, value, words in (
        (_CLIP, clip_norm, "Trainer(gradient_clip_val={})"),
        (_STEPS, accumulate, "Trainer(accumulate_grad_batches={})"),
    ):
        if value is not None and own.get(key, value) != value:
            given = f"{key}={own[key]!r} in the JSON and {words.format(repr(value))}"
            faults.add(given, fix=f"write {words.format(own[key])}, or remove {key} from the JSON")
    steps = own.get(_STEPS, accumulate)
    micro = own.get(_MICRO)
    if micro is None:  # alone, the whole batch says what a part of it is
        micro, rest = divmod(own.get(_BATCH, steps * world_size), steps * world_size)
        micro = 1 if rest else micro
    product = micro * steps * world_size
    if own.get(_BATCH, product) != product:
        factors = f"{micro} a device x {steps} accumulated x {world_size} devices = {product}"
        given = f"{_BATCH}={own[_BATCH]!r} in the JSON and {factors}"
        faults.add(given, fix=f"write {_BATCH}: {product}, or leave it out")
    clip = own.get(_CLIP, 0.0 if clip_norm is None else clip_norm)  # left out, DeepSpeed would clip at 1.0
    return own | {_CLIP: clip, _STEPS: steps, _MICRO: micro}


def check_made_by_engine(key: str, block: Any, faults: Faults) -> None:
    """Note why DeepSpeed cannot make what the JSON's block ``optimizer`` or ``scheduler`` says."""
    if not isinstance(block, Mapping) or not isinstance(cast("Any", block).get("type"), str):
        faults.add(f"{key}={block!r} in the JSON", allowed="{'type': ..., 'params': {...}}", fix="name a type")
        return
    params: Mapping[str, Any] = cast("Any", block).get("params") or {}
    for name, value in params.items():
        if is_unset(value):
            given = f"{key}.params.{name}={value!r} in the JSON, which nobody resolves"
            faults.add(given, fix=f"write a number, or make the {key} in configure_optimizers()")


# ---------------------------------------------------------------------- for DeepSpeed alone

#: how a dynamic scale may differ from DeepSpeed's: what it does otherwise there stands in a comment
_MAY_DIFFER: Mapping[str, Any] = {"growth_delay": 0, "max_scale": None, "at_min": "hold"}
_RUN_IT = "run the plan itself, strategy='mp_deepspeed_zero2'"


class DeepSpeedJson:
    """The part of a plan that reads and writes DeepSpeed's JSON."""

    #: what became of every key of the JSON that the plan was read from; ``None`` where it was not
    deepspeed_notes: DeepSpeedNotes | None = None

    @classmethod
    def from_deepspeed(cls, config: read.JsonLike) -> Self:
        """A plan from a DeepSpeed JSON: a mapping, an OmegaConf ``DictConfig`` or the path of a file.

        ``fp16`` is ``"16-mixed"``, ``bf16`` ``"bf16-mixed"``, neither ``"32-true"``; ``"auto"`` that nothing decides is
        ``"auto"``. ``deepspeed_notes`` says of every key whether the plan took it (``docs/how-to/deepspeed.md``).

        Raises:
            PlanError: no JSON, or one that asks for formats a plan cannot carry out; every fault is named at once.
        """
        policy, notes = read.read_policy(config)
        plan: Self = cast("Any", cls).from_policy(policy)
        plan.deepspeed_notes = notes
        return plan

    def to_deepspeed(
        self,
        path: str | PathLike[str] | None = None,
        *,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        train_micro_batch_size_per_gpu: int = 1,
        gradient_accumulation_steps: int = 1,
        gradient_clipping: float = 0.0,
    ) -> dict[str, Any]:
        """The JSON with which DeepSpeed alone does what the plan says; it is written to ``path`` too, if that is given.

        What a DeepSpeed JSON has no key for (pins, TF32, checkpointing, …) stands as lines under ``_comment``.
        Batch, accumulation and clipping (a norm; 0 is none) go into it as given: DeepSpeed has no Trainer to ask.

        Raises:
            PlanError: what DeepSpeed would carry out with other numbers (growth and backoff factors, true modes, …);
                every fault is named at once, and no file is written.
        """
        policy: PrecisionPolicy = cast("Any", self).policy
        config: dict[str, Any] = {
            _MICRO: train_micro_batch_size_per_gpu,
            _STEPS: gradient_accumulation_steps,
            _CLIP: gradient_clipping,
        }
        with Faults(SUBJECT) as faults:
            faults.extend(check("", config)[1].values())
            if policy.precision == "auto":
                raise PlanError([*faults.found, Fault("precision='auto'", fix=f"write a mode, or {_RUN_IT}")], SUBJECT)
            offload = {"offload_optimizer": offload_optimizer, "offload_parameters": offload_parameters}
            config |= {"fp16": {}, "bf16": {}, **compose(policy, None, faults, stage=stage, **offload)}
            # What a plan carries out itself in its own strategies DeepSpeed alone has to be told.
            if policy.compute_dtype == "bf16":
                config["bf16"] = {"enabled": True, "check_grad_overflow": policy.nonfinite.action == "skip"}
            if policy.buffer_dtype is not None:
                config["data_types"]["buffer_dtype"] = policy.buffer_dtype
            comment = _unsaid(policy, read.read_policy(config)[0], faults)
        if comment:
            config = {"_comment": comment, **config}
        if path is not None:
            Path(path).write_text(json.dumps(config, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        return config


def _unsaid(policy: PrecisionPolicy, back: PrecisionPolicy, faults: Faults) -> list[str]:
    """A line for each field that the JSON reads back otherwise; noted is what DeepSpeed would do with other numbers.

    The scale's rule: deepspeed/runtime/fp16/loss_scaler.py, DynamicLossScaler.
    """
    wanted, again = policy.to_dict(), back.to_dict()
    wanted["pins"], again["pins"] = {pin.pattern: pin.dtype for pin in policy.pins}, {}
    if policy.loss_scaling is not None and not policy.loss_scaling.dynamic:  # nothing but the scale is read
        wanted["loss_scaling"] = again["loss_scaling"]
    lines: list[str] = []
    for field, value in wanted.items():
        own, there = {field: value}, {field: again[field]}
        if isinstance(value, dict) and again[field]:
            own, there = ({f"{field}.{part}": one for part, one in block.items()} for block in (value, again[field]))
        for path, one in own.items():
            if one == there[path]:
                continue
            given, part = f"{path}={one!r}", path.removeprefix("loss_scaling.")
            numbers = path == "precision" or (part != path and one != _MAY_DIFFER.get(part, there[path]))
            if numbers or given == "nonfinite.action='raise'":
                faults.add(f"{given}, where DeepSpeed has {there[path]!r}", fix=f"write that, or {_RUN_IT}")
            else:
                lines.append(f"{given}: DeepSpeed's JSON has no key for it, set it in your own code")
    return lines
