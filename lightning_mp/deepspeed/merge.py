"""Functions that write DeepSpeed's JSON for a plan, and report contradictions with the user's JSON.

Under a plan, DeepSpeed's ZeRO engine only shards. The plan enters autocast, casts and scales the
loss. So the blocks ``bf16`` and ``torch_autocast`` stay off, and ``fp16`` states the plan's loss
scaling.

``to_deepspeed`` writes a JSON for DeepSpeed without this package. There these blocks are on. A
field that DeepSpeed would carry out with other numbers is refused. A field without a key in the
JSON becomes a comment.
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
    """Return a deep copy of a config without comments (``_...``) and unset values.

    ``optimizer`` and ``scheduler`` are copied with all their values. Tuples become lists.
    """
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
    """Return ``config`` with its missing keys taken from ``defaults``, block by block."""
    merged = dict(defaults)
    for key, value in config.items():
        below = merged.get(key)
        merged[key] = over(below, value) if isinstance(below, dict) and isinstance(value, Mapping) else value
    return merged


def completed(policy: PrecisionPolicy, user: Mapping[str, Any] | None) -> PrecisionPolicy:
    """Return ``policy`` with the loss scale of the user's JSON, if its own equals the default.

    The policy is returned unchanged if the JSON has no loss scale or a wrong one. A default that
    the user wrote explicitly is replaced, too.
    """
    block: Any = (user or {}).get("fp16")
    if policy.loss_scaling != LossScaling() or not isinstance(block, Mapping):
        return policy
    said = check("fp16", without_unset(block))[0]  # ``compose`` reports its faults
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
    """Return the engine's config for a plan and a ZeRO stage, merged with the user's JSON.

    Every unknown key, bad value and contradiction between JSON, plan and strategy is added to
    ``faults``. A config is returned in case of a fault, too.

    Args:
        policy: a policy whose precision is not ``"auto"``. It is ``completed`` from the JSON first.
        user: the user's JSON, or ``None``.
        faults: the faults to add to.
        stage: the strategy's ZeRO stage.
        offload_optimizer: put optimizer state on the CPU, unless the JSON names another device.
        offload_parameters: put parameters on the CPU, unless the JSON names another device.
        fp16_supported: DeepSpeed accepts fp16 on this device. Otherwise its ``fp16`` block is off,
            and the plan still computes in fp16.
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
    # The dtypes are removed even if they agree with the plan. The engine would cast pinned weights
    # as well, or refuse a dtype that is not its own mode's.
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
    """Add a fault for every key that contradicts the plan, with both values."""
    blocks = {name: config.get(name, {}) for name in ("fp16", "bf16", "torch_autocast", "data_types")}
    autocast = read.dtype_of(blocks["torch_autocast"].get("dtype"))
    #: by key: the plan's field, and the values that agree with it
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
    """Add a fault for a value in the JSON that differs from the plan's or the strategy's."""
    fix = f"remove {given.partition('=')[0]} from the JSON, or write the same in both"
    faults.add(f"{given} in the JSON and {otherwise}", fix=fix)


def _said(rule: LossScaling) -> dict[str, Any]:
    """Return the keys of the ``fp16`` block for a loss scale.

    A value that DeepSpeed has no number for is left out. The plan carries it out itself.
    """
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
    """Return ``zero_optimization``: the strategy's stage and offloading, and the user's other keys.

    A stage that does not exist, and every contradiction, is added to ``faults``. ``zero`` is
    modified.
    """
    if stage not in (1, 2, 3):
        faults.add(f"stage={stage!r}", allowed="1, 2, 3", fix="choose 'ddp' for training without shards")
    if zero.get("stage", stage) != stage:
        _contradiction(f"zero_optimization.stage={zero['stage']!r}", f"stage={stage!r} in the strategy", faults)
    # The deprecated flags become the blocks that replaced them, because DeepSpeed refuses both
    # together.
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
    """Return a copy of a composed config with the Trainer's clipping, accumulation and batch.

    A fault is added for every value that JSON and Trainer give differently. Clipping that only the
    JSON has is kept, and the caller must clip by it. If neither has clipping, it is 0 (off).

    Args:
        config: the result of ``compose``.
        faults: the faults to add to.
        clip_norm: the Trainer's ``gradient_clip_val``; ``None`` if it has none.
        accumulate: the Trainer's ``accumulate_grad_batches``.
        world_size: the number of ranks.
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
    if micro is None:  # then it follows from train_batch_size
        micro, rest = divmod(own.get(_BATCH, steps * world_size), steps * world_size)
        micro = 1 if rest else micro
    product = micro * steps * world_size
    if own.get(_BATCH, product) != product:
        factors = f"{micro} a device x {steps} accumulated x {world_size} devices = {product}"
        given = f"{_BATCH}={own[_BATCH]!r} in the JSON and {factors}"
        faults.add(given, fix=f"write {_BATCH}: {product}, or leave it out")
    clip = own.get(_CLIP, 0.0 if clip_norm is None else clip_norm)  # without the key DeepSpeed clips at 1.0
    return own | {_CLIP: clip, _STEPS: steps, _MICRO: micro}


def check_made_by_engine(key: str, block: Any, faults: Faults) -> None:
    """Add a fault for each reason why DeepSpeed cannot make the JSON's optimizer or scheduler.

    ``key`` is ``"optimizer"`` or ``"scheduler"``. The block needs a ``type``, and no parameter may
    be unset.
    """
    if not isinstance(block, Mapping) or not isinstance(cast("Any", block).get("type"), str):
        faults.add(f"{key}={block!r} in the JSON", allowed="{'type': ..., 'params': {...}}", fix="name a type")
        return
    params: Mapping[str, Any] = cast("Any", block).get("params") or {}
    for name, value in params.items():
        if is_unset(value):
            given = f"{key}.params.{name}={value!r} in the JSON, which nobody resolves"
            faults.add(given, fix=f"write a number, or make the {key} in configure_optimizers()")


# ---------------------------------------------------------------------- for DeepSpeed alone

#: by field: a value of a dynamic loss scale that differs from DeepSpeed's, but only adds a comment
_MAY_DIFFER: Mapping[str, Any] = {"growth_delay": 0, "max_scale": None, "at_min": "hold"}
_RUN_IT = "run the plan itself, strategy='mp_deepspeed_zero2'"


class DeepSpeedJson:
    """The part of a plan that reads and writes DeepSpeed's JSON."""

    #: the outcome for every key of the JSON, if the plan was read from one; else ``None``
    deepspeed_notes: DeepSpeedNotes | None = None

    @classmethod
    def from_deepspeed(cls, config: read.JsonLike) -> Self:
        """Return a plan from a DeepSpeed JSON.

        ``config`` is a mapping, an OmegaConf ``DictConfig`` or the path of a JSON file.
        An enabled ``fp16`` block becomes ``"16-mixed"``, an enabled ``bf16`` block
        ``"bf16-mixed"``. ``torch_autocast`` counts as the block of its dtype. Without any,
        precision is ``"32-true"``, or ``"auto"`` if a block has ``"enabled": "auto"``. The plan's
        ``deepspeed_notes`` say for every key whether the plan took it
        (``docs/how-to/deepspeed.md``).

        Raises:
            PlanError: the source is no JSON object, or it asks for formats that a plan cannot carry
                out. All faults of the keys are named at once.
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
        """Return a JSON with which DeepSpeed, without this package, trains as the plan declares.

        Fields without a key in DeepSpeed's JSON (pins, TF32, checkpointing, …) become lines under
        ``_comment``. You carry those out in your own code.

        Args:
            path: a file to write the JSON to, or ``None``. An existing file is replaced.
            stage: the ZeRO stage, 1 to 3.
            offload_optimizer: put optimizer state on the CPU.
            offload_parameters: put parameters on the CPU, in stage 3 only.
            train_micro_batch_size_per_gpu: the batch of one device in one micro-batch.
            gradient_accumulation_steps: micro-batches a step.
            gradient_clipping: the largest norm of the gradients. 0 is no clipping.

        Raises:
            PlanError: the precision is ``"auto"``, or an argument is wrong. Or DeepSpeed would
                carry out a field with other numbers (growth and backoff factors, true modes, …).
                All faults are named at once, and no file is written.
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
            # In the package's strategies the plan does this itself. Here DeepSpeed must.
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
    """Return a line for each field of the plan that the JSON loses without other numbers.

    ``back`` is the policy read back from the JSON. A fault is added for each field that DeepSpeed
    would carry out with other numbers. Its loss scale is ``DynamicLossScaler`` in
    ``deepspeed/runtime/fp16/loss_scaler.py``.
    """
    wanted, again = policy.to_dict(), back.to_dict()
    wanted["pins"], again["pins"] = {pin.pattern: pin.dtype for pin in policy.pins}, {}
    if policy.loss_scaling is not None and not policy.loss_scaling.dynamic:  # DeepSpeed then reads only the scale
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
