"""Functions that check DeepSpeed's JSON and turn it into a policy.

Checked are the names of top-level keys and the blocks that decide formats. The lists of keys come
from DeepSpeed 0.19.8, ``deepspeed/runtime/{config,constants,precision_config}.py``. DeepSpeed
itself checks the contents of other blocks.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

from lightning_mp.errors import Fault, Faults, PlanError, did_you_mean, is_number
from lightning_mp.policy import STORAGE_DTYPES, LossScaling, NonFinite, PrecisionPolicy
from lightning_mp.policy.load import plain_mapping
from lightning_mp.policy.pieces import DTYPES

JsonLike = Mapping[str, Any] | str | PathLike[str]

SUBJECT = "DeepSpeed config"
#: the key for the dtype of reduced gradients
SENT = "communication_data_type"
#: the key for the dtype of gradients that sequence-parallel ranks reduce
SENT_BESIDE_SEQUENCES = "seq_parallel_communication_data_type"
_MODES = {"fp16": "16-mixed", "bf16": "bf16-mixed"}


def dtype_of(value: object) -> str | None:
    """Return ``"fp32"``, ``"bf16"`` or ``"fp16"`` for any known spelling of one, else ``None``."""
    name = DTYPES.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
    return name if name in STORAGE_DTYPES else None


def is_unset(value: object) -> bool:
    """True if a value counts as not given: ``None``, or Hugging Face's ``"auto"``."""
    return value is None or (isinstance(value, str) and value == "auto")


def _is_integer(value: Any, least: float = -math.inf, most: float = math.inf) -> bool:
    return is_number(value) and value == int(value) and least <= value <= most  # as in DeepSpeed, 5e8 is an integer


#: by kind of value: the words for it in a message, and the test
_KINDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "any": ("any value", lambda _: True),
    "bool": ("true, false", lambda value: isinstance(value, bool)),
    "integer": ("a whole number", _is_integer),
    "positive": ("a whole number >= 1", lambda value: _is_integer(value, 1)),
    "number": ("a finite number >= 0", lambda value: is_number(value) and value >= 0),
    "object": ("an object, {...}", lambda value: isinstance(value, Mapping)),
    "stage": ("0, 1, 2, 3", lambda value: _is_integer(value, 0, 3)),
    "dtype": ("fp32, bf16, fp16", lambda value: dtype_of(value) is not None),
    # DeepSpeed's get_communication_data_type reads only the short names.
    "mean": ("mean, as every strategy averages gradients over ranks", lambda value: value == "mean"),
    "sent": ("fp32, bf16, fp16", lambda value: isinstance(value, str) and value.lower() in STORAGE_DTYPES),
}


def _keys(**names: str) -> dict[str, str]:
    return {name: kind for kind, listed in names.items() for name in listed.split()}


#: the keys at top level (``""``) and in each format block, with the kind of their value
BLOCKS: Mapping[str, Mapping[str, str]] = {
    "": _keys(
        object="""
            activation_checkpointing aio autotuning bf16 checkpoint comet comms_logger compile csv_monitor
            data_efficiency data_types expert_parallel flops_profiler fp16 hybrid_engine optimizer pipeline scheduler
            tensor_parallel tensorboard timers torch_autocast wandb zero_optimization""",
        positive="train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
        number="gradient_clipping",
        sent=SENT,
        mean="gradient_allreduce_op",
        # DeepSpeed does not read comms_config, but many published configs have it.
        any="""
            allgather_size comms_config data_parallel_size dataloader_drop_last datastates_ckpt disable_allgather
            disable_python_gc dump_state gradient_predivide_factor log_level
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
    "bf16": _keys(
        bool="enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states"
    ),
    "torch_autocast": _keys(bool="enabled", dtype="dtype", any="lower_precision_safe_modules"),
    "data_types": _keys(dtype="grad_accum_dtype param_dtype buffer_dtype", any="keep_in_fp32_modules"),
}
#: the keys of the block ``zero_optimization`` that a strategy decides
_ZERO = _keys(stage="stage", bool="cpu_offload cpu_offload_param", object="offload_optimizer offload_param")

#: by key of the fp16 block: the field of a dynamic ``LossScaling`` that it sets
RULE: Mapping[str, str] = {
    "initial_scale_power": "init_scale",
    "loss_scale_window": "growth_interval",
    "hysteresis": "hysteresis",
    "consecutive_hysteresis": "consecutive_hysteresis",
    "min_loss_scale": "min_scale",
}

_FORMATS = ("amp", "fp8", "quantize_training", "compression_training", "weight_quantization")
_REMOVED = (
    *("nebula", "sparse_gradients", "eigenvalue", "sparse_attention", "elasticity", "graph_harvesting"),
    *("curriculum_learning", "progressive_layer_drop"),
)
#: by path: why a key is refused. It chooses a format that the plan decides, or DeepSpeed 0.19
#: removed it.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(_FORMATS, "precision comes from the plan"),
    **dict.fromkeys(_REMOVED, "DeepSpeed 0.19 removed it"),
    **dict.fromkeys(
        ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads", "bf16.bf16_optimizer_states"),
        "the plan's precision says what is stored: fp32 under the '-mixed' modes, the half format under '-true'",
    ),
    "torch_autocast.lower_precision_safe_modules": "pins={pattern: dtype} chooses the format of a module",
    "zero_optimization.zero_quantized_gradients": "the plan's reduce_dtype says what gradients are summed in",
    "zero_optimization.zero_quantized_weights": "the plan says what weights are gathered in, and that is not 8 bits",
    "zero_optimization.zero_quantized_nontrainable_weights": "the plan says what weights are stored in",
    "zero_optimization.zenflow": "a step of the plan applies the whole gradient",
}
#: the place under Lightning that decides a top-level key, instead of the engine
_ELSEWHERE: Mapping[str, str] = {
    "optimizer": "configure_optimizers() makes it; ZeRO takes the JSON's if that returns None",
    "scheduler": "configure_optimizers() makes it; ZeRO takes the JSON's if that makes none",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "train_micro_batch_size_per_gpu": "the dataloader's batch_size",
    "train_batch_size": "the dataloader's batch_size x accumulate_grad_batches x devices",
    "activation_checkpointing": "checkpointing= says which modules recompute",
    "comms_config": "nothing reads it",
    "zero_optimization": "make_strategy('deepspeed_zero1' to 'deepspeed_zero3', plan, config=...) takes the block",
}


def check(where: str, given: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, Fault]]:
    """Return the well-formed entries of a block, and the faults of the others by path.

    Nothing is raised. ``where`` is a name in ``BLOCKS``, ``""`` for the whole file, or
    ``zero_optimization``. Blocks are checked too, and a block in the first dict has only its
    well-formed entries. Integers become ``int``. ``None`` is well formed, and so is ``"auto"``
    unless it stands for a whole format block. An unknown key is a fault, except in
    ``zero_optimization``. A comment (``_...``) is in neither dict, nor is a refused key that is
    off.
    """
    known = BLOCKS.get(where, _ZERO)
    good: dict[str, Any] = {}
    wrong: dict[str, Fault] = {}
    for key, value in given.items():
        path, kind = f"{where}.{key}" if where else str(key), known.get(key, "any")
        allowed, fits = _KINDS[kind]
        if str(key).startswith("_"):
            continue
        if path in REFUSED:
            if value and not (isinstance(value, Mapping) and cast("Any", value).get("enabled") is False):
                wrong[path] = Fault(f"{path}={value!r}: {REFUSED[path]}", fix=f"remove {path} from the JSON")
        elif where in BLOCKS and key not in known:
            wrong[path] = Fault(f"unknown key {path}", fix=did_you_mean(str(key), known, "remove it", 1))
        elif is_unset(value) and (value is None or path not in BLOCKS):
            good[key] = value
        elif not fits(value):
            wrong[path] = Fault(f"{path}={value!r}", allowed=allowed, fix="correct it")
        elif path in (*BLOCKS, "zero_optimization"):
            good[key], below = check(path, value)
            wrong |= below
        else:
            good[key] = int(value) if kind in ("integer", "positive") else value
    return good, wrong


def load_json(source: JsonLike) -> dict[str, Any]:
    """Return a DeepSpeed config as a plain dict.

    ``source`` is a mapping, an OmegaConf ``DictConfig`` or the path of a JSON file.

    Raises:
        PlanError: the file cannot be read, or the source is no JSON object.
    """
    loaded: Any = source
    try:
        if isinstance(source, (str, PathLike)):
            loaded = json.loads(Path(source).read_text(encoding="utf-8-sig"))
        if isinstance(loaded, Mapping):
            return plain_mapping(loaded)
        given = f"{str(source)!r}, a {type(loaded).__name__}"
    except PlanError as error:
        raise PlanError(error.faults, SUBJECT) from error
    except (OSError, ValueError) as error:
        given = f"{str(source)!r}: {error}"
    raise PlanError.of(f"{given}, which is no JSON object, nor the path of one", "write {'fp16': {...}}", SUBJECT)


@dataclass(frozen=True, slots=True)
class DeepSpeedNotes:
    """The outcome for every key of a DeepSpeed JSON, by path (``"fp16.loss_scale"``).

    Each key has a reason. ``print`` shows a line for each key.
    """

    #: keys that the plan took, with the plan's field and value
    taken: dict[str, str]
    #: keys that the DeepSpeed engine, the Trainer or the model decides
    left: dict[str, str]
    #: unknown or removed keys, bad values, and keys that would change the plan's numbers
    refused: dict[str, str]

    def __str__(self) -> str:
        kinds = (("taken", self.taken), ("left", self.left), ("refused", self.refused))
        return "\n".join(f"{kind:<8}{key}: {reason}" for kind, notes in kinds for key, reason in notes.items())


def read_policy(source: JsonLike) -> tuple[PrecisionPolicy, DeepSpeedNotes]:
    """Return the policy that a DeepSpeed JSON asks for, and the notes on its keys.

    A bad key that decides neither a format nor the loss scale raises nothing: it is noted as
    refused.

    Raises:
        PlanError: the source is no JSON object, or its keys for formats and the loss scale cannot
            be a plan. All faults of these keys are named at once. Examples are an unknown key, a
            bad value, several formats to compute in, and an ``"auto"`` that stays undecided.
    """
    config = load_json(source)
    notes = DeepSpeedNotes({}, {}, {})
    with Faults(SUBJECT) as faults:
        good, wrong = check("", config)
        for path, fault in wrong.items():
            if _decides_formats(path.partition(".")[0]):
                faults.extend([fault])
            else:
                notes.refused[path] = f"{fault.problem}: {fault.fix}"
        fields = _fields(good, notes.taken, faults)
    for key, value in config.items():
        paths, why = [str(key)], _ELSEWHERE.get(key, "the engine's own: give the JSON to the strategy as config=")
        if key in BLOCKS and value:
            on = key == "data_types" or value.get("enabled") in (True, "auto")
            paths, why = [f"{key}.{entry}" for entry in value], "the engine's own" if on else f"{key} is off"
        elif key in BLOCKS or key in REFUSED:
            why = "it is off"
        elif str(key).startswith("_"):
            why = "a comment"
        notes.left.update(dict.fromkeys((path for path in paths if path not in notes.taken | notes.refused), why))
    return PrecisionPolicy(**fields), notes


def _fields(good: dict[str, Any], taken: dict[str, str], faults: Faults) -> dict[str, Any]:
    """Return the policy's fields.

    Keys that set them are added to ``taken``, contradictions to ``faults``. ``good`` has the
    well-formed entries of the whole file.
    """
    blocks = {name: good.get(name) or {} for name in BLOCKS if name}
    fp16, bf16, types = blocks["fp16"], blocks["bf16"], blocks["data_types"]
    precision = _precision(blocks, taken, faults)
    fields: dict[str, Any] = {"precision": precision}
    if precision == "auto" or fp16.get("enabled") is True:
        rule = fields["loss_scaling"] = read_rule(fp16, faults)
        if rule is not None and "loss_scale" in fp16:
            taken["fp16.loss_scale"] = "dynamic loss scaling" if rule.dynamic else f"{rule!r}"
        for key, field in RULE.items() if rule is not None and rule.dynamic else ():
            if key in fp16:
                taken[f"fp16.{key}"] = f"loss_scaling.{field}={getattr(rule, field)!r}"
    elif precision == "16-mixed":
        fields["loss_scaling"] = LossScaling.torch()  # torch_autocast in fp16 scales with a torch.amp.GradScaler
    checks = bf16.get("check_grad_overflow")
    if precision in ("bf16-mixed", "auto") and bf16.get("enabled") and not is_unset(checks):
        fields["nonfinite"] = NonFinite(action="skip" if checks else "ignore")
        taken["bf16.check_grad_overflow"] = f"nonfinite={fields['nonfinite'].action!r}"
    if dtype_of(types.get("grad_accum_dtype")) not in (None, "fp32"):
        given = f"data_types.grad_accum_dtype={types['grad_accum_dtype']!r}"
        faults.add(given, allowed="fp32, as the plan does", fix="remove data_types.grad_accum_dtype from the JSON")
    for path, field, value in (
        (SENT, "reduce_dtype", dtype_of(good.get(SENT))),
        ("data_types.buffer_dtype", "buffer_dtype", dtype_of(types.get("buffer_dtype"))),
    ):
        if value is not None:
            fields[field], taken[path] = value, f"{field}={value!r}"
    return fields


def _precision(blocks: dict[str, dict[str, Any]], taken: dict[str, str], faults: Faults) -> str:
    """Return the plan's ``precision``, even after a fault.

    Keys that set it are added to ``taken``, contradictions to ``faults``. With ``"auto"`` in the
    fp16 or bf16 block, and no format on, it is ``"auto"``.
    """
    enabled = {name: blocks[name].get("enabled") for name in _MODES}
    on = {f"{name}.enabled=True": name for name, value in enabled.items() if value is True}
    autocast = blocks["torch_autocast"]
    dtype = dtype_of(autocast.get("dtype"))
    if autocast.get("enabled") == "auto":
        faults.add("torch_autocast.enabled='auto'", fix="write true or false")
    elif autocast.get("enabled") and dtype in _MODES:
        on[f"torch_autocast.enabled=True with dtype={autocast['dtype']!r}"] = dtype
        taken["torch_autocast.dtype"] = f"precision={_MODES[dtype]!r}"
    elif autocast.get("enabled"):
        faults.add("torch_autocast.enabled=True without a dtype", fix="write torch_autocast.dtype: bf16, or fp16")
    if len(set(on.values())) > 1:
        faults.add(" and ".join(on), allowed="one format to compute in", fix="set enabled to false in all but one")
    precision = _MODES[next(iter(on.values()))] if on else "auto" if "auto" in enabled.values() else "32-true"
    if precision == "auto" and False in enabled.values():
        undecided, off = sorted(enabled, key=lambda name: enabled[name] is False)
        given = f"{undecided}.enabled='auto' with {off}.enabled=False, which a plan of precision 'auto' may choose"
        faults.add(given, fix=f"write {undecided}.enabled: true for {_MODES[undecided]!r}, false for '32-true'")
    for name, value in enabled.items():
        if "enabled" in blocks[name]:
            taken[f"{name}.enabled"] = f"precision={precision!r}" if value else "off"
    return precision


def read_rule(block: Mapping[str, Any], faults: Faults) -> LossScaling | None:
    """Return the loss scale of a well-formed ``fp16`` block.

    If its values are out of range, faults are added and ``None`` is returned.
    """
    said = {key: block[key] for key in ("loss_scale", *RULE) if not is_unset(block.get(key))}
    try:
        return LossScaling.deepspeed(**said)
    except PlanError as error:
        faults.extend(replace(fault, problem=f"fp16: {fault.problem}") for fault in error.faults)
    return None


def _decides_formats(key: str) -> bool:
    """True if a top-level key decides a format or the loss scale, or was probably meant to.

    An unknown key counts if it is spelled like such a key, or if it belongs in a format block.
    """
    known = (*filter(None, BLOCKS), SENT, *_FORMATS)
    if key in known or key in BLOCKS[""] or key in REFUSED:
        return key in known
    within = {name for block in known for name in BLOCKS.get(block, ())} - {"enabled", "dtype"}
    return key in within or bool(difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.65))
