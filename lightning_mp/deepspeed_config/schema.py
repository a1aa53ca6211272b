"""The keys of a DeepSpeed JSON: what each may hold, and how a wrong one is reported.

The keys of the file, and of the blocks that decide formats and the loss scale, are listed here; below
``zero_optimization`` and ``compile`` DeepSpeed's own models are asked where it is installed. The lists are those of
DeepSpeed 0.19.8, ``deepspeed/runtime/{config,constants,precision_config}.py``; tests compare them with the installed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from lightning_mp.errors import Fault, is_number, nearest
from lightning_mp.policy import DTYPES, STORAGE_DTYPES, PrecisionPolicy

SUBJECT = "DeepSpeed config"


def dtype_of(value: object) -> str | None:
    """``"fp32"``, ``"bf16"`` or ``"fp16"`` from any of the spellings DeepSpeed knows, else ``None``."""
    name = DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
    return name if name in STORAGE_DTYPES else None


def is_unset(value: object) -> bool:
    """Whether a value counts as not given: ``null``, or Hugging Face's ``"auto"``."""
    return value is None or (isinstance(value, str) and value == "auto")


def is_off(value: Any) -> bool:
    """Whether a block or a flag switches nothing on."""
    return not value or (isinstance(value, Mapping) and cast("Any", value).get("enabled") is False)


def _is_integer(value: Any, least: float = -math.inf) -> bool:
    return is_number(value) and value == int(value) and value >= least  # 5e8 is one, as in DeepSpeed


#: what a key may hold: how a message says it, and the test of it
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("any value", lambda _: True),
    "bool": ("true, false", lambda value: isinstance(value, bool)),
    "integer": ("a whole number", _is_integer),
    "count": ("a whole number >= 0", lambda value: _is_integer(value, 0)),
    "positive": ("a whole number >= 1", lambda value: _is_integer(value, 1)),
    "number": ("a finite number >= 0", lambda value: is_number(value) and value >= 0),
    "text": ("a string", lambda value: isinstance(value, str)),
    "list": ("a list", lambda value: isinstance(value, (list, tuple))),
    "object": ("an object, {...}", lambda value: isinstance(value, Mapping)),
    "stage": ("0, 1, 2, 3", lambda value: _is_integer(value, 0) and value <= 3),
    "dtype": ("fp32, bf16, fp16", lambda value: dtype_of(value) is not None),
    # get_communication_data_type knows the short names only.
    "sent dtype": ("fp32, bf16, fp16", lambda value: isinstance(value, str) and value.lower() in STORAGE_DTYPES),
}


def _keys(**names: str) -> dict[str, str]:
    return {name: kind.replace("_", " ") for kind, listed in names.items() for name in listed.split()}


#: every key whose value is checked here, by the block it stands in (``""`` is the file)
BLOCKS: Mapping[str, Mapping[str, str]] = {
    "": _keys(
        object="""
            activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger compile csv_monitor
            data_efficiency data_types expert_parallel flops_profiler fp16 hybrid_engine optimizer pipeline scheduler
            tensor_parallel tensorboard timers torch_autocast wandb weight_quantization zero_optimization""",
        bool="""
            dataloader_drop_last disable_allgather disable_python_gc dump_state managed_gradient_accumulation
            memory_breakdown prescale_gradients use_data_before_expert_parallelism wall_clock_breakdown
            zero_allow_untested_optimizer zero_force_ds_cpu_optimizer""",
        positive="""
            train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps sequence_parallel_size
            data_parallel_size""",
        count="steps_per_print vocabulary_size allgather_size",
        number="gradient_clipping gradient_predivide_factor",
        text="gradient_allreduce_op",
        sent_dtype="communication_data_type seq_parallel_communication_data_type",
        any="comms_config datastates_ckpt log_level",  # the first is no key of DeepSpeed's, and common
    ),
    "fp16": _keys(
        bool="enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
        number="loss_scale min_loss_scale",
        integer="initial_scale_power",
        positive="loss_scale_window hysteresis",
    ),
    **dict.fromkeys(
        ("bf16", "bfloat16"),
        _keys(
            bool="enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
        ),
    ),
    "torch_autocast": _keys(bool="enabled", dtype="dtype", list="lower_precision_safe_modules"),
    "data_types": _keys(dtype="grad_accum_dtype param_dtype buffer_dtype", list="keep_in_fp32_modules"),
}
#: of ZeRO's block, what a strategy decides; the rest is its model's affair
_ZERO = _keys(stage="stage", bool="cpu_offload cpu_offload_param", object="offload_optimizer offload_param")
_MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
}

#: the loss scale's keys of the fp16 block, the field of LossScaling that each says, and DeepSpeed's default
RULE: Mapping[str, tuple[str, Any]] = {
    "initial_scale_power": ("init_scale", 16),
    "loss_scale_window": ("growth_interval", 1000),
    "hysteresis": ("hysteresis", 2),
    "consecutive_hysteresis": ("consecutive_hysteresis", False),
    "min_loss_scale": ("min_scale", 1),
}


@dataclass(frozen=True, slots=True)
class Says:
    """What a key says of a plan."""

    #: the value that says what a policy does; ``None`` where it says nothing of it
    value: Callable[[PrecisionPolicy], Any]
    #: how a message shows that of the plan
    words: Callable[[PrecisionPolicy], str]
    #: what in a plan says the same as a value of the key
    same: Callable[[Any], str]


def json_value(key: str, value: Any) -> Any:
    """A field of ``LossScaling`` as its key says it; ``None`` where the scale is no power of 2."""
    if key != "initial_scale_power":
        return value
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else None


def _of_rule(key: str, field: str) -> Says:
    def value(policy: PrecisionPolicy) -> Any:
        rule = policy.loss_scaling
        return None if rule is None or not rule.dynamic else json_value(key, getattr(rule, field))

    power = "2**" if key == "initial_scale_power" else ""
    return Says(
        value,
        lambda policy: f"loss_scaling.{field}={getattr(policy.loss_scaling, field)!r}",
        lambda given: f"LossScaling({field}={power}{given!r})",
    )


def _loss_scale(policy: PrecisionPolicy) -> Any:
    rule = policy.loss_scaling
    return None if rule is None else 0 if rule.dynamic else rule.init_scale


def _precision(policy: PrecisionPolicy) -> str:
    return f"precision={policy.precision!r}"


def _field(name: str) -> Says:
    return Says(
        lambda policy: getattr(policy, name),
        lambda policy: f"{name}={getattr(policy, name)!r}",
        lambda given: f"{name}={dtype_of(given)!r}",
    )


#: the keys that say what a plan says: they are read into a policy, compared with one, and written from one
SAYS: Mapping[str, Says] = {
    "fp16.enabled": Says(
        lambda policy: policy.compute_dtype == "fp16",
        _precision,
        lambda on: f"precision={'16-mixed' if on else '32-true'!r}",
    ),
    "bf16.enabled": Says(
        lambda policy: policy.precision.startswith("bf16"), _precision, lambda _: "precision='bf16-mixed'"
    ),
    "fp16.loss_scale": Says(
        _loss_scale,
        lambda policy: f"loss_scaling={policy.loss_scaling!r}, fp16.loss_scale={_loss_scale(policy)!r},",
        lambda scale: f"loss_scaling=LossScaling{f'.static({scale!r})' if scale else '()'}",
    ),
    **{f"fp16.{key}": _of_rule(key, field) for key, (field, _) in RULE.items()},
    "communication_data_type": _field("reduce_dtype"),
    "data_types.grad_accum_dtype": Says(
        lambda _: "fp32", lambda _: "gradients accumulated in 'fp32'", lambda _: "nothing: it is no choice of a plan's"
    ),
    "data_types.param_dtype": Says(
        lambda policy: policy.storage_dtype,
        lambda policy: f"{_precision(policy)}, stored as {policy.storage_dtype!r},",
        lambda _: "another precision",
    ),
    "data_types.buffer_dtype": _field("buffer_dtype"),
}


_ROUNDS = "it would round the weights, and precision comes from the plan"
#: top-level keys that choose formats instead of the plan
FORMATS: Mapping[str, str] = {
    "amp": "Apex amp would choose formats too, and precision comes from the plan",
    "fp8": "DeepSpeed has no such block, and precision comes from the plan",
    "quantize_training": _ROUNDS,
    "compression_training": _ROUNDS,
}
#: top-level keys that DeepSpeed 0.19 removed and refuses (``_REMOVED_TOP_LEVEL_CONFIG_KEYS``)
REMOVED = (
    *("nebula", "sparse_gradients", "eigenvalue", "sparse_attention", "elasticity", "graph_harvesting"),
    *("curriculum_learning", "progressive_layer_drop"),
)
REFUSED: Mapping[str, str] = {**FORMATS, **dict.fromkeys(REMOVED, "DeepSpeed 0.19 removed it and refuses the key")}


def check(where: str, given: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Fault]]:
    """The well-formed entries of a block (``""``: of the file), and what is wrong with the others, by their path.

    Comments (``_...``) are neither; an unset value is well formed.
    """
    table = BLOCKS.get(where, _ZERO if where == "zero_optimization" else {})
    wrong = _by_model(where, given) if where in _MODELS else {}
    good: dict[str, Any] = {}
    for key, value in given.items():
        path = f"{where}.{key}" if where else str(key)
        if str(key).startswith("_"):
            continue
        if where in BLOCKS and key not in table:
            wrong[path] = _unknown(where, str(key))
        elif is_unset(value):
            good[key] = value
        elif isinstance(value, Mapping) and path in (*BLOCKS, *_MODELS):
            good[key], below = check(path, cast("Mapping[Any, Any]", value))
            wrong |= below
        elif fault := _misfit(path, "object" if path in BLOCKS else table.get(key, "any"), value):
            wrong[path] = fault
        elif not any(other == path or other.startswith(f"{path}.") for other in wrong):
            good[key] = value
    return good, wrong


def _misfit(path: str, kind: str, value: Any) -> Fault | None:
    """What is wrong with a value, if anything."""
    allowed, fits = _KINDS[kind]
    if fits(value):
        return None
    quoted = isinstance(value, str) and kind in ("bool", "integer", "count", "positive", "number", "stage")
    return Fault(f"{path}={value!r}", allowed, "write it without quotes" if quoted else "correct it")


def _unknown(where: str, key: str) -> Fault:
    given = f"unknown key {where}.{key}" if where else f"unknown key {key}"
    allowed = ", ".join(BLOCKS[where]) if where else "DeepSpeed's own, https://www.deepspeed.ai/docs/config-json/"
    near = nearest(key, BLOCKS[where], count=1 if where else 3)
    blocks = {**BLOCKS, "zero_optimization": _ZERO}
    homes = [name for name, block in blocks.items() if key in block and name not in ("", where, "bfloat16")]
    hints = [f"did you mean {near}?"] if near else []
    hints += [f"move it into {' or '.join(homes)}"] if homes and key != "enabled" else []
    return Fault(given, allowed, " or ".join(hints if where and hints else [*hints, "remove it"]))


def _by_model(where: str, given: Mapping[Any, Any]) -> dict[str, Fault]:
    """What DeepSpeed's own model says of a block; nothing where DeepSpeed is not installed."""
    module, name = _MODELS[where]
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # on import DeepSpeed logs which device it found, then what is deprecated
    try:
        model: Any = getattr(import_module(module), name)
    except Exception:  # not installed, or not importable, as without a CUDA toolkit
        return {}
    else:
        try:
            # the deprecated flags become blocks, next to which the model would not take them
            entries = {str(key): value for key, value in without_unset(given, False).items()}
            model(**{key: value for key, value in entries.items() if "cpu_offload" not in key})
        except ValueError as error:  # pydantic's own is one
            errors: Any = getattr(error, "errors", list[Any])()
            # what is wrong with the block as a whole depends on the stage, which may be the strategy's to say
            return dict(_fault_of_model(where, model, each) for each in errors if each["loc"])
    finally:
        logging.disable(before)
    return {}


def _fault_of_model(where: str, model: Any, error: Mapping[str, Any]) -> tuple[str, Fault]:
    """One of pydantic's errors, by the path of the entry."""
    *above, key = (str(part) for part in error["loc"])
    path, value = ".".join((where, *above, key)), error["input"]
    if error["type"] == "extra_forbidden":
        near = nearest(key, () if above else model.model_fields, count=1)
        return path, Fault(
            f"unknown key {path}", "DeepSpeed's own of that block", f"did you mean {near}?" if near else "remove it"
        )
    quoted = isinstance(value, str) and error["type"] not in ("enum", "model_type")
    return path, Fault(
        f"{path}={value!r}",
        error["msg"].removeprefix("Input should be "),
        "write it without quotes" if quoted else "correct it",
    )


def without_unset(value: Any, top: bool = True) -> Any:
    """A deep copy without comments (``_...``) and without what is unset.

    ``optimizer`` and ``scheduler`` are copied as they are.
    """
    if isinstance(value, (list, tuple)):
        return [without_unset(item, False) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    entries = cast("Mapping[Any, Any]", value).items()
    return {
        key: deepcopy(item) if top and key in ("optimizer", "scheduler") else without_unset(item, False)
        for key, item in entries
        if not is_unset(item) and not str(key).startswith("_")
    }
