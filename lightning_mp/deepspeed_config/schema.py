"""The keys of a DeepSpeed JSON that decide formats, the loss scale or the batch: what each may hold, and what it says.

The lists are those of DeepSpeed 0.19.8, ``deepspeed/runtime/{config,constants,precision_config}.py``; tests compare
them with the installed. What stands below other blocks is DeepSpeed's to check.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from operator import attrgetter
from typing import Any, cast

from lightning_mp.errors import Fault, did_you_mean, is_number
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
    "positive": ("a whole number >= 1", lambda value: _is_integer(value, 1)),
    "number": ("a finite number >= 0", lambda value: is_number(value) and value >= 0),
    "object": ("an object, {...}", lambda value: isinstance(value, Mapping)),
    "stage": ("0, 1, 2, 3", lambda value: _is_integer(value, 0) and value <= 3),
    "dtype": ("fp32, bf16, fp16", lambda value: dtype_of(value) is not None),
    # get_communication_data_type knows the short names only.
    "sent dtype": ("fp32, bf16, fp16", lambda value: isinstance(value, str) and value.lower() in STORAGE_DTYPES),
}


def _keys(**names: str) -> dict[str, str]:
    return {name: kind.replace("_", " ") for kind, listed in names.items() for name in listed.split()}


_BF16 = _keys(
    bool="enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
)
#: every key of the file (``""``) and of the blocks that decide formats
BLOCKS: Mapping[str, Mapping[str, str]] = {
    "": _keys(
        object="""
            activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger compile csv_monitor
            data_efficiency data_types expert_parallel flops_profiler fp16 hybrid_engine optimizer pipeline scheduler
            tensor_parallel tensorboard timers torch_autocast wandb weight_quantization zero_optimization""",
        positive="train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
        number="gradient_clipping",
        sent_dtype="communication_data_type",
        # comms_config is no key of DeepSpeed's, and common
        any="""
            allgather_size comms_config data_parallel_size dataloader_drop_last datastates_ckpt disable_allgather
            disable_python_gc dump_state gradient_allreduce_op gradient_predivide_factor log_level
            managed_gradient_accumulation memory_breakdown prescale_gradients seq_parallel_communication_data_type
            sequence_parallel_size steps_per_print use_data_before_expert_parallelism vocabulary_size
            wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer""",
    ),
    "fp16": _keys(
        bool="enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
        number="loss_scale min_loss_scale",
        integer="initial_scale_power",
        positive="loss_scale_window hysteresis",
    ),
    "bf16": _BF16,
    "bfloat16": _BF16,
    "torch_autocast": _keys(bool="enabled", dtype="dtype", any="lower_precision_safe_modules"),
    "data_types": _keys(dtype="grad_accum_dtype param_dtype buffer_dtype", any="keep_in_fp32_modules"),
}
#: of ZeRO's block, what a strategy decides
_ZERO = _keys(stage="stage", bool="cpu_offload cpu_offload_param", object="offload_optimizer offload_param")

#: the loss scale's keys of the fp16 block, the field of LossScaling that each says, and DeepSpeed's default
RULE: Mapping[str, tuple[str, Any]] = {
    "initial_scale_power": ("init_scale", 16),
    "loss_scale_window": ("growth_interval", 1000),
    "hysteresis": ("hysteresis", 2),
    "consecutive_hysteresis": ("consecutive_hysteresis", False),
    "min_loss_scale": ("min_scale", 1),
}


def of_rule(key: str, policy: PrecisionPolicy) -> Any:
    """What a key of ``RULE`` is for a policy; ``None`` without a dynamic scale, or where the scale is no power of 2."""
    rule = policy.loss_scaling
    if rule is None or not rule.dynamic:
        return None
    value = getattr(rule, RULE[key][0])
    if key != "initial_scale_power":
        return value
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else None


def loss_scale(policy: PrecisionPolicy) -> float | None:
    """``fp16.loss_scale`` for a policy: 0 is a dynamic one."""
    rule = policy.loss_scaling
    return None if rule is None else 0 if rule.dynamic else rule.init_scale


#: the keys that say what a plan says: the plan's field, and the key's value for a policy
SAYS: Mapping[str, tuple[str, Callable[[PrecisionPolicy], Any]]] = {
    "fp16.enabled": ("precision", lambda policy: policy.compute_dtype == "fp16"),
    "bf16.enabled": ("precision", lambda policy: policy.precision.startswith("bf16")),
    "fp16.loss_scale": ("loss_scaling", loss_scale),
    **{
        f"fp16.{key}": (f"loss_scaling.{field}", lambda policy, key=key: of_rule(key, policy))
        for key, (field, _) in RULE.items()
    },
    "communication_data_type": ("reduce_dtype", attrgetter("reduce_dtype")),
    "data_types.grad_accum_dtype": ("precision", lambda _: "fp32"),
    "data_types.param_dtype": ("precision", attrgetter("storage_dtype")),
    "data_types.buffer_dtype": ("buffer_dtype", attrgetter("buffer_dtype")),
}

_FORMAT = "precision comes from the plan"
_GONE = "DeepSpeed 0.19 removed it"
_REMOVED = (
    *("nebula", "sparse_gradients", "eigenvalue", "sparse_attention", "elasticity", "graph_harvesting"),
    *("curriculum_learning", "progressive_layer_drop"),
)
#: top-level keys that choose formats instead of the plan, and those that DeepSpeed 0.19 refuses
FORMATS = dict.fromkeys(("amp", "fp8", "quantize_training", "compression_training"), _FORMAT)
REFUSED: Mapping[str, str] = {**FORMATS, **dict.fromkeys(_REMOVED, _GONE)}
_MASTERS = "the plan's precision says what is stored: fp32 under the '-mixed' modes, the half format under '-true'"
#: entries of the blocks that choose formats instead of the plan
REFUSED_ENTRIES: Mapping[str, str] = {
    "fp16.fp16_master_weights_and_grads": _MASTERS,
    **{f"{name}.bf16_master_weights_and_grads": _MASTERS for name in ("bf16", "bfloat16")},
    **{f"{name}.bf16_optimizer_states": _MASTERS for name in ("bf16", "bfloat16")},
    "torch_autocast.lower_precision_safe_modules": "pins={pattern: dtype} chooses the format of a module",
}


def check(where: str, given: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Fault]]:
    """The well-formed entries of a block (``""``: of the file), and what is wrong with the others, by their path.

    Comments (``_...``) are neither; an unset value is well formed.
    """
    known = BLOCKS.get(where, _ZERO)
    good: dict[str, Any] = {}
    wrong: dict[str, Fault] = {}
    for key, value in given.items():
        path = f"{where}.{key}" if where else str(key)
        if str(key).startswith("_"):
            continue
        allowed, fits = _KINDS[known.get(key, "any")]
        if where in BLOCKS and key not in known:
            fix = did_you_mean(str(key), known, "remove it", 1)
            wrong[path] = Fault(f"unknown key {path}", "DeepSpeed's own", fix)
        elif is_unset(value):
            good[key] = value
        elif not fits(value):
            wrong[path] = Fault(f"{path}={value!r}", allowed, "correct it")
        elif path in (*BLOCKS, "zero_optimization"):
            good[key], below = check(path, value)
            wrong |= below
        else:
            good[key] = value
    return good, wrong


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
