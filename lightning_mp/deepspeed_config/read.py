"""A policy from a DeepSpeed JSON: what it says of formats and of the loss scale, and a note on every other key."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

from lightning_mp.deepspeed_config import schema
from lightning_mp.deepspeed_config.schema import SUBJECT, dtype_of, is_off, is_unset
from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import NonFinite, PrecisionPolicy
from lightning_mp.policy.load import plain_mapping
from lightning_mp.policy.loss_scaling import FP32_MAX, LossScaling

JsonLike = Mapping[str, Any] | str | PathLike[str]

_MODES = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
_BLOCKS = ("fp16", "bf16", "bfloat16", "torch_autocast", "data_types")
_SENT = "communication_data_type"
#: a top-level key that belongs into one of those blocks decides a format, too
_MISPLACED = {key for block in _BLOCKS for key in schema.BLOCKS[block]} - {"enabled", "dtype"}
#: top-level keys that something else than the engine says under Lightning
_ELSEWHERE: Mapping[str, str] = {
    "optimizer": "configure_optimizers() makes it",
    "scheduler": "configure_optimizers() makes it",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "train_micro_batch_size_per_gpu": "the dataloader's batch_size",
    "train_batch_size": "the dataloader's batch_size x accumulate_grad_batches x devices",
    "activation_checkpointing": "checkpointing= says which modules recompute; the block tunes DeepSpeed's own function",
    "comms_config": "no key of DeepSpeed's, nothing reads it",
}
_ENGINE = "the engine's own: give the JSON to the strategy as config="


@dataclass(frozen=True, slots=True)
class DeepSpeedNotes:
    """What became of every key (``"fp16.loss_scale"``, ``"optimizer"``) and why; ``print`` shows a line for each."""

    #: the plan says it now, in these words
    taken: dict[str, str]
    #: the DeepSpeed engine, the Trainer or the model says it
    left: dict[str, str]
    #: unknown or removed keys, and values that DeepSpeed would refuse; the plan does without them
    refused: dict[str, str]

    def __str__(self) -> str:
        kinds = (("taken", self.taken), ("left", self.left), ("refused", self.refused))
        return "\n".join(f"{kind:<8}{key}: {reason}" for kind, notes in kinds for key, reason in notes.items())


def load_json(source: JsonLike) -> dict[str, Any]:
    """A DeepSpeed config as a plain dict, from a mapping, an OmegaConf ``DictConfig`` or the path of a JSON file.

    Raises:
        PlanError: no such file, broken JSON (with its line and column), a key written twice, no object.
    """
    with Faults(SUBJECT) as faults:
        given, loaded = repr(source), cast("Any", source)
        if isinstance(source, (str, PathLike)):
            given = repr(str(source))
            loaded = _parsed(Path(source), faults)
        if not faults.found and not isinstance(loaded, Mapping):
            what = given if loaded is source else f"{given} with a {type(loaded).__name__} in it"
            faults.add(what, "an object, {...}, or the path of a JSON file with one", "write {'fp16': {...}}")
    try:
        return plain_mapping(loaded)
    except PlanError as error:
        raise PlanError(error.faults, SUBJECT) from error


def _parsed(path: Path, faults: Faults) -> Any:
    name, twice = repr(str(path)), dict[str, None]()

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice.update(dict.fromkeys(key for key in keys if keys.count(key) > 1))
        return dict(pairs)

    if not path.is_file():
        faults.add(f"{name}, which is no file", "the path of a JSON file", "check the path")
        return None
    loaded = None
    try:
        loaded = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        where = f"{name}: {error.msg} at line {error.lineno}, column {error.colno}"
        faults.add(where, "JSON, which has no comments and no last comma", "correct it")
    except (OSError, ValueError) as error:
        faults.add(f"{name}: {error}", "JSON in UTF-8", "correct the file")
    for key in twice:
        faults.add(f"{key!r} twice in {name}", "each key once in its object", "keep one of them")
    return loaded


def read_policy(source: JsonLike) -> tuple[PrecisionPolicy, DeepSpeedNotes]:
    """The policy that a DeepSpeed JSON asks for, and what became of its keys.

    Raises:
        PlanError: no JSON object; an unknown key or a wrong value where formats or the loss scale are decided, two
            formats at once, one that a plan cannot carry out, an ``"auto"`` that nothing resolves; all together.
    """
    reader = _Reader(load_json(source))
    return reader.policy(), reader.notes


class _Reader:
    """One JSON on its way to a policy; what is wrong is collected in ``faults``."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.faults = Faults(SUBJECT)
        self.notes = DeepSpeedNotes({}, {}, {})
        self.taken, self.left, self.refused = self.notes.taken, self.notes.left, self.notes.refused
        self.config = config
        self.bf16 = "bfloat16" if is_unset(config.get("bf16")) and "bfloat16" in config else "bf16"
        self.good = self._checked()
        self.blocks = {name: self._block(name) for name in _BLOCKS}

    def policy(self) -> PrecisionPolicy:
        precision = self._precision()
        for name in ("fp16", self.bf16, "torch_autocast"):
            self._switch(name, precision)
        fields: dict[str, Any] = {
            "precision": precision,
            "loss_scaling": self._loss_scaling(precision),
            "nonfinite": self._nonfinite(precision),
            "reduce_dtype": self._reduce_dtype(),
            "buffer_dtype": self._data_types(precision),
        }
        self._half_masters("fp16", ("fp16_master_weights_and_grads",), "16-true")
        self._half_masters(self.bf16, ("bf16_master_weights_and_grads", "bf16_optimizer_states"), "bf16-true")
        self._note_the_rest()
        self.faults.raise_if_any()
        return PrecisionPolicy(**fields)

    # --- the keys of the file ---------------------------------------------------------------------------------------

    def _checked(self) -> dict[str, Any]:
        """The well-formed entries; a wrong one is a fault where it decides a format, else a note."""
        shadowed = "bf16" if self.bf16 == "bfloat16" else "bfloat16"
        entries = {key: value for key, value in self.config.items() if key != shadowed and key not in schema.REFUSED}
        good, wrong = schema.check("", entries)
        for path, fault in wrong.items():
            if _decides_formats(path.partition(".")[0]):
                self.faults.extend([fault])
            else:
                self.refused[path] = f"{fault.given}: {fault.fix}"
        for key, value in self.config.items():
            if key in schema.REFUSED:
                self._removed(key, value)
            elif key not in (*_BLOCKS, _SENT) and str(key) not in wrong:
                self.left[str(key)] = _where_it_is_set(str(key), value)
        return good

    def _removed(self, key: str, value: Any) -> None:
        if is_off(value):
            self.left[key] = "it is off"
        elif key in schema.FORMATS:
            fix = f"remove {key} from the JSON; fp16.enabled or bf16.enabled says what computes"
            self.faults.add(f"{key}={value!r}", f"no {key}: {schema.REFUSED[key]}", fix)
        else:
            self.refused[key] = schema.REFUSED[key]

    def _block(self, name: str) -> dict[str, Any]:
        """A block's well-formed entries; ``"auto"`` and ``null`` stay as they are."""
        block = self.config.get(name, {})
        if block is None:
            self.left[name] = "null: not given"
        elif name in ("bf16", "bfloat16") and name != self.bf16 and name in self.config:
            self.refused[name] = f"DeepSpeed reads {self.bf16} where both stand: remove one"
        elif is_unset(block):
            self.faults.add(f"{name}={block!r}", "an object, {...}", "correct it")
        elif isinstance(block, Mapping) and name in self.config:
            self.left |= {name: "empty"} if not block else {}
            self.left |= {f"{name}.{key}": "a comment" for key in block if str(key).startswith("_")}
            return self.good[name]
        return {}

    def _note_the_rest(self) -> None:
        """A note on every entry of the blocks that has none yet."""
        reasons = {"fp16.auto_cast": "the engine casts floating inputs to fp16; under a plan autocast does"}
        noted = self.taken.keys() | self.left.keys() | self.refused.keys()
        for name, block in self.blocks.items():
            off = name != "data_types" and block.get("enabled") not in (True, "auto")
            for path in (f"{name}.{key}" for key in block):
                if path not in noted:
                    self.left[path] = f"{name} is off" if off else reasons.get(path, "the engine's own")

    # --- who computes in which format -------------------------------------------------------------------------------

    def _precision(self) -> str:
        pair = {name: self.blocks[name].get("enabled") for name in ("fp16", self.bf16)}
        formats = {"fp16": "fp16", self.bf16: "bf16"}
        on = {f"{name}.enabled=True": formats[name] for name, enabled in pair.items() if enabled is True}
        on |= self._autocast()
        if len(set(on.values())) > 1:
            self.faults.add(" and ".join(on), "one format to compute in", "set enabled to false in all but one")
        if on:
            return _MODES[next(iter(on.values()))]
        if "auto" not in pair.values():
            return "32-true"
        for off, undecided in (("fp16", self.bf16), (self.bf16, "fp16")):
            if pair[off] is False:
                self.faults.add(
                    f"{undecided}.enabled='auto' with {off}.enabled=False",
                    f"true or false: nothing here fills it in, and a plan of precision 'auto' may choose {off}",
                    f"write {undecided}.enabled: true for {_MODES[formats[undecided]]!r}, false for '32-true'",
                )
        return "auto"

    def _autocast(self) -> dict[str, str]:
        block = self.blocks["torch_autocast"]
        enabled, dtype = block.get("enabled"), dtype_of(block.get("dtype"))
        if enabled == "auto":
            allowed = "true, false: nothing fills this 'auto' in"
            self.faults.add("torch_autocast.enabled='auto'", allowed, "write true or false")
        if enabled is not True:
            return {}
        if block.get("lower_precision_safe_modules") is not None:
            given, fix = "torch_autocast.lower_precision_safe_modules", "remove it; pins={pattern: dtype} says the same"
            self.faults.add(given, "torch_autocast without it: the plan enters PyTorch's own autocast", fix)
        given = "torch_autocast.enabled=True with " + (f"dtype={block['dtype']!r}" if "dtype" in block else "no dtype")
        if dtype not in _MODES:
            self.faults.add(given, "bf16, fp16", "write the dtype")
            return {}
        self.taken["torch_autocast.dtype"] = f"precision={_MODES[dtype]!r}"
        return {given: dtype}

    def _switch(self, name: str, precision: str) -> None:
        stored = "weights stored in fp32, as DeepSpeed's masters are, and cast where they are used"
        undecided = "precision='auto' chooses by device and model; write true or false to decide"
        words: dict[Any, str] = {
            True: f"precision={precision!r}: {stored}",
            False: "off",
            None: "null: off, DeepSpeed's default",
            "auto": f"'auto': {undecided if precision == 'auto' else 'off, since another block decides'}",
        }
        if "enabled" in self.blocks[name]:
            self.taken[f"{name}.enabled"] = words[self.blocks[name]["enabled"]]

    def _half_masters(self, name: str, keys: tuple[str, ...], instead: str) -> None:
        for key in keys:
            if self.blocks[name].get(key) is True:
                allowed = f"{name} without it: the plan stores fp32 weights, gradients and optimizer state"
                fix = f"remove {name}.{key}, or write MixedPrecisionPlan({instead!r}), which stores half weights"
                self.faults.add(f"{name}.{key}=True", allowed, fix)

    # --- the loss scale ---------------------------------------------------------------------------------------------

    def _loss_scaling(self, precision: str) -> LossScaling | None:
        block = self.blocks["fp16"]
        if precision == "16-mixed" and block.get("enabled") is not True:
            return LossScaling.torch()  # DeepSpeed's torch_autocast in fp16 scales with a torch.amp.GradScaler
        if precision not in ("16-mixed", "auto"):
            return None
        scale = self._number("loss_scale", 0)
        self._take("loss_scale", 0, f"LossScaling.static({scale!r})" if scale else "dynamic loss scaling")
        if scale:
            unused = "the scale is static, and DeepSpeed reads none of the rule"
            self.left |= {f"fp16.{key}": unused for key in schema.RULE if key in block}
            return None if scale > FP32_MAX else self._built(loss_scale=scale)
        rule = self._built(**{key: self._number(key, default) for key, (_, default) in schema.RULE.items()})
        for key, (field, default) in schema.RULE.items():
            self._take(key, default, f"loss_scaling.{field}={getattr(rule, field, None)!r}")
        return rule

    def _take(self, key: str, default: Any, words: str) -> None:
        if key in self.blocks["fp16"]:
            value = self.blocks["fp16"][key]
            unset = f"{value!r}: DeepSpeed's default, {default!r}: " if is_unset(value) else ""
            self.taken[f"fp16.{key}"] = unset + words

    def _number(self, key: str, default: Any) -> Any:
        value: Any = self.blocks["fp16"].get(key)
        if is_unset(value):
            return default
        if key in ("loss_scale", "min_loss_scale") and value > FP32_MAX:
            self.faults.add(f"fp16.{key}={value!r}", "a number that fp32 can hold", "correct it")
            return FP32_MAX
        return int(value) if isinstance(value, float) and key != "loss_scale" and value.is_integer() else value

    def _built(self, **words: Any) -> LossScaling | None:
        try:
            return LossScaling.deepspeed(**words)
        except PlanError as error:
            self.faults.extend(replace(fault, given=f"fp16: {fault.given}") for fault in error.faults)
        return None

    # --- the rest of the numbers ------------------------------------------------------------------------------------

    def _nonfinite(self, precision: str) -> NonFinite:
        block = self.blocks[self.bf16]
        check = block.get("check_grad_overflow")
        if precision not in ("bf16-mixed", "auto") or block.get("enabled") not in (True, "auto") or is_unset(check):
            return NonFinite()
        action = "skip" if check else "ignore"
        where = "" if check else "; the mp_deepspeed strategies refuse that, mp_ddp and mp_fsdp2 carry it out"
        self.taken[f"{self.bf16}.check_grad_overflow"] = f"nonfinite={action!r}{where}"
        return NonFinite(action=action)

    def _reduce_dtype(self) -> str:
        value = self.config.get(_SENT)
        if is_unset(value):
            self.left |= {_SENT: f"{value!r}: not given, the plan sums in fp32"} if _SENT in self.config else {}
            return "fp32"
        dtype = dtype_of(self.good.get(_SENT)) or "fp32"
        self.taken[_SENT] = f"reduce_dtype={dtype!r}"
        return dtype

    def _data_types(self, precision: str) -> str | None:
        block = {key: dtype_of(value) for key, value in self.blocks["data_types"].items() if not is_unset(value)}
        summed, stored, buffers = (block.get(f"{name}_dtype") for name in ("grad_accum", "param", "buffer"))
        if summed is not None:
            self.taken["data_types.grad_accum_dtype"] = "gradients are summed over micro-batches in fp32"
        if summed not in (None, "fp32"):
            fix = "remove data_types.grad_accum_dtype from the JSON"
            self.faults.add(f"data_types.grad_accum_dtype={summed!r}", "fp32, in which a plan sums them", fix)
        if stored is not None:
            self.left["data_types.param_dtype"] = "the engine's copy; a plan stores fp32 and casts where it computes"
        halves = [name for name in ("fp16", self.bf16) if self.blocks[name].get("enabled") is True]
        computed = stored if precision == "auto" else dtype_of(halves[0]) if halves else "fp32"
        if stored is not None and stored != computed:
            fix = "remove data_types.param_dtype from the JSON"
            self.faults.add(f"data_types.param_dtype={stored!r}", f"{computed}, as the JSON's engine computes", fix)
        if buffers is not None:
            self.taken["data_types.buffer_dtype"] = f"buffer_dtype={buffers!r}"
        return buffers


def _decides_formats(key: str) -> bool:
    """Whether a top-level key decides a format or the loss scale, or was meant to."""
    known = (*_BLOCKS, _SENT)
    meant = key in _MISPLACED or difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.7)
    return key in known or (key not in schema.BLOCKS[""] and bool(meant))


def _where_it_is_set(key: str, value: Any) -> str:
    """Where a top-level key that the plan does not take is set under Lightning."""
    if key.startswith("_"):
        return "a comment"
    if key == "zero_optimization" and isinstance(value, Mapping):
        stage: Any = value.get("stage", 0)
        if stage in (1, 2, 3) and not isinstance(stage, bool):
            return f"make_strategy('deepspeed_zero{stage:.0f}', plan, config=...) takes the block"
        given = "stage 0 shards nothing" if stage == 0 else f"stage={stage!r}"
        return f"{given}: use strategy='mp_ddp', or choose a stage, strategy='mp_deepspeed_zero1' to 3"
    plain = isinstance(value, (int, float, str)) and not isinstance(value, bool) and value != "auto"
    return _ELSEWHERE.get(key, _ENGINE).replace("...", repr(value) if plain else "...")
