"""The keys of a DeepSpeed JSON: what each may hold, and how a wrong one is reported.

The keys of the file, and of the blocks that decide formats and the loss scale, are listed here; below
``zero_optimization`` and ``compile`` DeepSpeed's own models are asked where it is installed. The lists are those of
DeepSpeed 0.19.8, ``deepspeed/runtime/{config,constants,precision_config}.py``; tests compare them with the installed.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import cache
from importlib import import_module
from typing import Annotated, Any, cast, get_args

from lightning_mp.errors import Fault, is_number, nearest
from lightning_mp.policy import DTYPES, STORAGE_DTYPES

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
_NEVER_QUOTED = ("bool", "integer", "count", "positive", "number", "stage")


def _keys(**names: str) -> dict[str, str]:
    return {name: kind.replace("_", " ") for kind, listed in names.items() for name in listed.split()}


TOP = _keys(
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
)

FP16 = _keys(
    bool="enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
    number="loss_scale min_loss_scale",
    integer="initial_scale_power",
    positive="loss_scale_window hysteresis",
)

BF16 = _keys(
    bool="enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
)

TORCH_AUTOCAST = _keys(bool="enabled", dtype="dtype", list="lower_precision_safe_modules")

DATA_TYPES = _keys(dtype="grad_accum_dtype param_dtype buffer_dtype", list="keep_in_fp32_modules")

#: keys of the fp16 block, the field of LossScaling that each says, and DeepSpeed's default
RULE: Mapping[str, tuple[str, Any]] = {
    "initial_scale_power": ("init_scale", 16),
    "loss_scale_window": ("growth_interval", 1000),
    "hysteresis": ("hysteresis", 2),
    "consecutive_hysteresis": ("consecutive_hysteresis", False),
    "min_loss_scale": ("min_scale", 1),
}

#: the keys of ZeRO's block that a strategy decides; the others are DeepSpeed's
_ZERO = _keys(stage="stage", bool="cpu_offload cpu_offload_param", object="offload_optimizer offload_param")
_MODELS = {
    "zero_optimization": ("deepspeed.runtime.zero.config", "DeepSpeedZeroConfig"),
    "compile": ("deepspeed.compile.config", "CompileConfig"),
}


#: the blocks whose keys are listed here, by where they stand (``""`` is the file)
_LISTED: Mapping[str, Mapping[str, Any]] = {
    "": TOP,
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "torch_autocast": TORCH_AUTOCAST,
    "data_types": DATA_TYPES,
}


def blocks() -> dict[str, Mapping[str, Any]]:
    """Every block whose keys are known, by where it stands; with what each key may hold."""
    return {**_LISTED, **_engine_blocks()}


def _keys_of(where: str) -> Mapping[str, Any] | None:
    return (_engine_blocks() if where.partition(".")[0] in _MODELS else _LISTED).get(where)


@cache
def _engine_blocks() -> dict[str, Mapping[str, Any]]:
    """The blocks that DeepSpeed's models know; none where it is not installed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # on import DeepSpeed logs which device it found
    try:
        models = {name: getattr(import_module(module), model) for name, (module, model) in _MODELS.items()}
    except Exception:  # not installed, or not importable, as without a CUDA toolkit
        return {}
    finally:
        logging.disable(before)
    found: dict[str, Mapping[str, Any]] = {}
    for name, model in models.items():
        found |= _fields_of(name, model)
    return found | {"zero_optimization": {**found["zero_optimization"], "stage": "stage"}}


def _fields_of(where: str, model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The keys of one of DeepSpeed's pydantic models, and those of the models below it."""
    table: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        table |= {name: field, field.alias or name: field}
        for kind in (field.annotation, *get_args(field.annotation)):
            if hasattr(kind, "model_fields"):
                yield from _fields_of(f"{where}.{name}", kind)
    yield where, table


_GONE = "DeepSpeed 0.19 removed it and refuses the key"
#: top-level keys that change numbers behind the plan or that DeepSpeed removed (``_REMOVED_TOP_LEVEL_CONFIG_KEYS``)
REFUSED: Mapping[str, str] = {
    "amp": "Apex amp would choose formats too, and precision comes from the plan",
    "fp8": "DeepSpeed has no such block, and precision comes from the plan",
    "quantize_training": "it would round the weights, and precision comes from the plan",
    "compression_training": "it would round the weights, and precision comes from the plan",
    "nebula": _GONE,
    "sparse_gradients": _GONE,
    "eigenvalue": _GONE,
    "sparse_attention": _GONE,
    "elasticity": _GONE,
    "graph_harvesting": _GONE,
    "curriculum_learning": f"{_GONE}; data_efficiency.data_sampling.curriculum_learning took its place",
    "progressive_layer_drop": _GONE,
}
#: those of them that choose formats
FORMATS = ("amp", "fp8", "quantize_training", "compression_training")
#: ``_REMOVED_ZERO_CONFIG_KEYS``
REMOVED_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")


def check(where: str, given: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Fault]]:
    """The well-formed entries of a block (``""``: of the file), and what is wrong with the others, by their path.

    Comments (``_...``) are neither; an unset value is well formed.
    """
    known = _keys_of(where)
    table = (_ZERO if where == "zero_optimization" else {}) if known is None else known
    good: dict[str, Any] = {}
    wrong: dict[str, Fault] = {}
    for key, value in given.items():
        path = f"{where}.{key}" if where else str(key)
        if str(key).startswith("_"):
            continue
        if known is not None and key not in known:
            wrong[path] = _unknown(where, str(key), table)
        elif is_unset(value):
            good[key] = value
        elif isinstance(value, Mapping) and (path in _MODELS or _keys_of(path) is not None):
            good[key], below = check(path, cast("Mapping[Any, Any]", value))
            wrong |= below
        elif fault := _misfit(path, "object" if _keys_of(path) else table.get(key, "any"), value):
            wrong[path] = fault
        else:
            good[key] = value
    return good, wrong


def _misfit(path: str, kind: Any, value: Any) -> Fault | None:
    """What is wrong with a value, if anything; ``kind`` is one of ``_KINDS`` or a field of DeepSpeed's model."""
    if isinstance(kind, str):
        allowed, fits = _KINDS[kind]
        quoted = kind in _NEVER_QUOTED
        if fits(value):
            return None
    else:
        from pydantic import TypeAdapter, ValidationError

        expected: Any = kind.annotation
        for constraint in kind.metadata:
            expected = Annotated[expected, constraint]
        adapter = TypeAdapter[Any](expected)
        try:
            if isinstance(value, (str, bool)):  # else pydantic would take "true" and "1" for true and 1
                adapter.validate_json(json.dumps(value), strict=True)
            else:
                adapter.validate_python(value)
        except ValidationError as error:
            first = error.errors()[0]
            allowed, quoted = first["msg"].removeprefix("Input should be "), first["type"] != "enum"
        else:
            return None
    return Fault(
        f"{path}={value!r}", allowed, "write it without quotes" if quoted and isinstance(value, str) else "correct it"
    )


def _unknown(where: str, key: str, table: Mapping[str, Any]) -> Fault:
    given = f"unknown key {where}.{key}" if where else f"unknown key {key}"
    allowed = ", ".join(table) if where else "DeepSpeed's own, https://www.deepspeed.ai/docs/config-json/"
    if key in REMOVED_ZERO:
        return Fault(given, allowed, f"remove it: {_GONE}")
    near = nearest(key, table, count=1 if where else 3)
    homes = [name for name, block in blocks().items() if key in block and name not in ("", where, "bfloat16")]
    hints = [f"did you mean {near}?"] if near else []
    hints += [f"move it into {' or '.join(homes)}"] if homes and key != "enabled" else []
    return Fault(given, allowed, " or ".join(hints if where and hints else [*hints, "remove it"]))


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
