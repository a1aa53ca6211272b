"""The keys of a DeepSpeed JSON that DeepSpeed 0.19.8 reads, what each may hold, and how a wrong one is reported.

Sources: ``deepspeed/runtime/{config,constants,precision_config}.py``, ``deepspeed/runtime/zero/{config,
offload_config}.py``, ``deepspeed/compile/config.py``; tests compare these tables with the installed ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, cast

from lightning_mp.errors import Faults, nearest
from lightning_mp.policy import DTYPES, STORAGE_DTYPES


def dtype_of(value: object) -> str | None:
    """``"fp32"``, ``"bf16"`` or ``"fp16"`` from any of the spellings DeepSpeed knows, else ``None``."""
    name = DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
    return name if name in STORAGE_DTYPES else None


def _number(value: Any) -> bool:
    # math.isfinite raises for an integer beyond the range of a float.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def _whole(value: Any, least: float = -math.inf) -> bool:
    return _number(value) and value == int(value) and value >= least


#: what may stand in a key: how a message says it, and the test of it
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("any value", lambda _: True),
    "bool": ("true, false", lambda value: isinstance(value, bool)),
    "whole": ("a whole number", _whole),
    "count": ("a whole number >= 0", lambda value: _whole(value, 0)),
    "positive": ("a whole number >= 1", lambda value: _whole(value, 1)),
    "number": ("a finite number >= 0", lambda value: _number(value) and value >= 0),
    "share": ("a number from 0 to 1", lambda value: _number(value) and 0 <= value <= 1),
    "text": ("a string", lambda value: isinstance(value, str)),
    "list": ("a list", lambda value: isinstance(value, (list, tuple))),
    "object": ("an object, {...}", lambda value: isinstance(value, Mapping)),
    "stage": ("0, 1, 2, 3", lambda value: _whole(value, 0) and value <= 3),
    "device": ("'none', 'cpu', 'nvme'", lambda value: value in ("none", "cpu", "nvme")),
    "dtype": ("fp32, bf16, fp16", lambda value: dtype_of(value) is not None),
    # get_communication_data_type knows the short names only.
    "sent dtype": ("fp32, bf16, fp16", lambda value: isinstance(value, str) and value.lower() in STORAGE_DTYPES),
}


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
    whole="initial_scale_power",
    positive="loss_scale_window hysteresis",
)

BF16 = _keys(
    bool="enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
)

TORCH_AUTOCAST = _keys(bool="enabled", dtype="dtype", list="lower_precision_safe_modules")

DATA_TYPES = _keys(dtype="grad_accum_dtype param_dtype buffer_dtype", list="keep_in_fp32_modules")

ZERO = _keys(
    stage="stage",
    object="offload_param offload_optimizer zenflow leaf_module",
    bool="""
        contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
        compute_grad_norm load_from_fp32_weights elastic_checkpoint cpu_offload cpu_offload_param
        cpu_offload_use_pin_memory gather_16bit_weights_on_model_save stage3_gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save use_all_reduce_for_fetch_params
        stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential
        ignore_unused_parameters legacy_stage1 round_robin_gradients parameter_alignment zero_quantized_weights
        zero_quantized_nontrainable_weights zero_quantized_gradients memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks
        save_muon_momentum_buffer_in_memory""",
    positive="reduce_bucket_size",
    count="""
        allgather_bucket_size sub_group_size prefetch_bucket_size stage3_prefetch_bucket_size
        param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold
        stage3_model_persistence_threshold max_live_parameters stage3_max_live_parameters max_reuse_distance
        stage3_max_reuse_distance zero_hpz_partition_size""",
    whole="module_granularity_threshold stage3_module_granularity_threshold",
)

OFFLOAD_OPTIMIZER = _keys(
    device="device",
    text="nvme_path",
    count="buffer_count",
    bool="pin_memory pipeline_read pipeline_write fast_init super_offload",
    share="ratio cpuadam_cores_perc",
)

OFFLOAD_PARAM = _keys(device="device", text="nvme_path", count="buffer_count buffer_size max_in_cpu", bool="pin_memory")

COMPILE = _keys(
    bool="""
        deepcompile autoep_non_moe free_activation offload_activation offload_activation_pin_memory offload_opt_states
        double_buffer symmetric_memory debug_log offload_parameters sync_before_reduce sync_after_reduce
        sync_before_allgather sync_after_allgather keep_int_input_tensors keep_all_input_tensors""",
    whole="free_activation_threshold",
    list="passes",
)

#: the blocks that are looked into, by where they stand
BLOCKS: Mapping[str, Mapping[str, str]] = {
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "torch_autocast": TORCH_AUTOCAST,
    "data_types": DATA_TYPES,
    "compile": COMPILE,
    "zero_optimization": ZERO,
    "zero_optimization.offload_optimizer": OFFLOAD_OPTIMIZER,
    "zero_optimization.offload_param": OFFLOAD_PARAM,
}

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
#: ``_REMOVED_ZERO_CONFIG_KEYS``
REMOVED_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")


def known(where: str, given: Mapping[str, Any], faults: Faults) -> dict[str, Any]:
    """The entries of a block (``""``: of the whole file) that are known and well typed; the rest is faults."""
    table = BLOCKS[where] if where else TOP
    prefix = f"{where}." if where else ""
    good: dict[str, Any] = {}
    for key, value in given.items():
        if key not in table:
            _unknown(prefix, str(key), table, faults)
            continue
        allowed, test = _KINDS[table[key]]
        if test(value):
            good[key] = known(key, value, faults) if key == "compile" else value
        else:
            fix = "write it without quotes" if isinstance(value, str) and table[key] not in _WORDS else "correct it"
            faults.add(f"{prefix}{key}={value!r}", allowed, fix)
    return good


_WORDS = ("text", "device", "dtype", "sent dtype", "object", "list")


def _unknown(prefix: str, key: str, table: Mapping[str, str], faults: Faults) -> None:
    if key in REMOVED_ZERO:
        faults.add(f"unknown key {prefix}{key}", ", ".join(table), f"remove it: {_GONE}")
        return
    near = nearest(key, table, count=1 if prefix else 3)
    homes = [name for name, block in BLOCKS.items() if key in block and f"{name}." != prefix and name != "bfloat16"]
    hints = [f"did you mean {near}?"] if near else []
    hints += [f"move it into {' or '.join(homes)}"] if homes and key != "enabled" else []
    allowed = ", ".join(table) if prefix else "DeepSpeed's own, https://www.deepspeed.ai/docs/config-json/"
    faults.add(f"unknown key {prefix}{key}", allowed, " or ".join(hints if prefix and hints else [*hints, "remove it"]))


def written(value: Any, top: bool = True) -> Any:
    """A deep copy without what counts as not given: ``"auto"`` (Hugging Face's word), ``null``, comments (``_…``).

    ``optimizer`` and ``scheduler`` are copied as they are.
    """
    if isinstance(value, (list, tuple)):
        return [written(item, False) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    entries = cast("Mapping[Any, Any]", value).items()
    return {
        key: deepcopy(item) if top and key in ("optimizer", "scheduler") else written(item, False)
        for key, item in entries
        if item is not None and not (isinstance(item, str) and item == "auto") and not str(key).startswith("_")
    }
