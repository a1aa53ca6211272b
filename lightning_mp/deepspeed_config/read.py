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
from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.policy import NonFinite, PrecisionPolicy
from lightning_mp.policy.load import plain_mapping
from lightning_mp.policy.pieces import LossScaling

JsonLike = Mapping[str, Any] | str | PathLike[str]

_MODES = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
_BLOCKS = ("fp16", "bf16", "bfloat16", "torch_autocast", "data_types")
_SENT = "communication_data_type"
#: top-level keys that something else than the engine says under Lightning
_ELSEWHERE: Mapping[str, str] = {
    "optimizer": "configure_optimizers() makes it",
    "scheduler": "configure_optimizers() makes it",
    "gradient_clipping": "Trainer(gradient_clip_val=...)",
    "gradient_accumulation_steps": "Trainer(accumulate_grad_batches=...)",
    "train_micro_batch_size_per_gpu": "the dataloader's batch_size",
    "train_batch_size": "the dataloader's batch_size x accumulate_grad_batches x devices",
    "activation_checkpointing": "checkpointing= says which modules recompute",
    "comms_config": "nothing reads it",
    "zero_optimization": "make_strategy('deepspeed_zero1' to 'deepspeed_zero3', plan, config=...) takes the block",
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
        PlanError: no such file, broken JSON (with its line and column), no object.
    """
    loaded = cast("Any", source)
    try:
        if isinstance(source, (str, PathLike)):
            loaded = json.loads(Path(source).read_text(encoding="utf-8-sig"))
        if isinstance(loaded, Mapping):
            return plain_mapping(loaded)
    except PlanError as error:
        raise PlanError(error.faults, SUBJECT) from error
    except (OSError, ValueError) as error:
        raise PlanError(
            [Fault(f"{str(source)!r}: {error}", "the path of a JSON file", "correct it")], SUBJECT
        ) from error
    fault = Fault(f"{str(source)!r}, a {type(loaded).__name__}", "an object, {...}", "write {'fp16': {...}}")
    raise PlanError([fault], SUBJECT)


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
        if not is_unset(config.get("bf16")) and config.get("bfloat16") is not None:
            self.refused["bfloat16"] = "DeepSpeed reads bf16 where both stand: remove one"
            config = {key: value for key, value in config.items() if key != "bfloat16"}
        self.bf16 = "bfloat16" if is_unset(config.get("bf16")) and "bfloat16" in config else "bf16"
        good, wrong = schema.check("", {key: value for key, value in config.items() if key not in schema.REFUSED})
        for path, fault in wrong.items():
            if _decides_formats(path.partition(".")[0]):
                self.faults.extend([fault])
            else:
                self.refused[path] = f"{fault.given}: {fault.fix}"
        self.good = good
        self.blocks = {name: good.get(name) or {} for name in _BLOCKS}
        for name, block in self.blocks.items():
            if is_unset(block) and block:
                self.faults.add(f"{name}={block!r}", "an object, {...}", "correct it")
                self.blocks[name] = {}
        for key, value in config.items():
            self._note(str(key), value)

    def _note(self, key: str, value: Any) -> None:
        """What becomes of a key of the file that the plan does not take."""
        if key in schema.REFUSED and not is_off(value):
            if key in schema.FORMATS:
                fix = f"remove {key} from the JSON; fp16.enabled or bf16.enabled says what computes"
                self.faults.add(f"{key}={value!r}", f"no {key}: {schema.REFUSED[key]}", fix)
            else:
                self.refused[key] = schema.REFUSED[key]
        elif key in schema.REFUSED or (key in _BLOCKS and not value):
            self.left[key] = "it is off"
        elif key in _BLOCKS and isinstance(value, Mapping):
            on = key == "data_types" or cast("Any", value).get("enabled") in (True, "auto")
            reason = "the engine's own" if on else f"{key} is off"
            self.left |= {f"{key}.{entry}": reason for entry in cast("Mapping[str, Any]", value)}
        elif key not in self.refused:
            self.left[key] = "a comment" if key.startswith("_") else _ELSEWHERE.get(key, _ENGINE)

    def _take(self, path: str, words: str) -> None:
        self.left.pop(path, None)
        self.taken[path] = words

    def policy(self) -> PrecisionPolicy:
        precision = self._precision()
        fields: dict[str, Any] = {
            "precision": precision,
            "loss_scaling": self._loss_scaling(precision),
            "nonfinite": self._nonfinite(precision),
            "reduce_dtype": self._reduce_dtype(),
            "buffer_dtype": self._data_types(precision),
        }
        for path, reason in schema.REFUSED_ENTRIES.items():
            name, key = path.split(".")
            if not is_off(self.blocks[name].get(key)):
                self.faults.add(f"{path}={self.blocks[name][key]!r}", f"{name} without it: {reason}", f"remove {path}")
        self.faults.raise_if_any()
        return PrecisionPolicy(**fields)

    def _precision(self) -> str:
        """Who computes in which format."""
        pair = {name: self.blocks[name].get("enabled") for name in ("fp16", self.bf16)}
        formats = {"fp16": "fp16", self.bf16: "bf16"}
        on = {f"{name}.enabled=True": formats[name] for name, enabled in pair.items() if enabled is True}
        on |= self._autocast()
        if len(set(on.values())) > 1:
            self.faults.add(" and ".join(on), "one format to compute in", "set enabled to false in all but one")
        precision = _MODES[next(iter(on.values()))] if on else "auto" if "auto" in pair.values() else "32-true"
        if precision == "auto" and False in pair.values():
            undecided = next(name for name, enabled in pair.items() if enabled == "auto")
            off = next(name for name, enabled in pair.items() if enabled is False)
            allowed = f"true or false: a plan of precision 'auto' may choose {off}"
            fix = f"write {undecided}.enabled: true for {_MODES[formats[undecided]]!r}, false for '32-true'"
            self.faults.add(f"{undecided}.enabled='auto' with {off}.enabled=False", allowed, fix)
        for name, enabled in pair.items():
            if f"{name}.enabled" in self.left:
                self._take(f"{name}.enabled", f"precision={precision!r}" if enabled in (True, "auto") else "off")
        return precision

    def _autocast(self) -> dict[str, str]:
        block = self.blocks["torch_autocast"]
        if block.get("enabled") == "auto":
            self.faults.add("torch_autocast.enabled='auto'", "true, false", "write true or false")
        if block.get("enabled") is not True:
            return {}
        dtype = dtype_of(block.get("dtype"))
        given = "torch_autocast.enabled=True with " + (f"dtype={block['dtype']!r}" if "dtype" in block else "no dtype")
        if dtype not in _MODES:
            self.faults.add(given, "bf16, fp16", "write the dtype")
            return {}
        self._take("torch_autocast.dtype", f"precision={_MODES[dtype]!r}")
        return {given: dtype}

    def _loss_scaling(self, precision: str) -> LossScaling | None:
        block = self.blocks["fp16"]
        if precision == "16-mixed" and block.get("enabled") is not True:
            return LossScaling.torch()  # DeepSpeed's torch_autocast in fp16 scales with a torch.amp.GradScaler
        if precision not in ("16-mixed", "auto"):
            return None
        said: dict[str, Any] = {key: block[key] for key in ("loss_scale", *schema.RULE) if not is_unset(block.get(key))}
        for key, value in said.items():
            if key != "loss_scale" and isinstance(value, float) and value.is_integer():
                said[key] = int(value)
        try:
            rule = LossScaling.deepspeed(**said)
        except PlanError as error:
            self.faults.extend(replace(fault, given=f"fp16: {fault.given}") for fault in error.faults)
            return None
        if "loss_scale" in block:
            self._take("fp16.loss_scale", "dynamic loss scaling" if rule.dynamic else f"{rule!r}")
        for key, (field, _) in schema.RULE.items() if rule.dynamic else ():
            if key in block:
                self._take(f"fp16.{key}", f"loss_scaling.{field}={getattr(rule, field)!r}")
        return rule

    def _nonfinite(self, precision: str) -> NonFinite:
        block = self.blocks[self.bf16]
        checks = block.get("check_grad_overflow")
        if precision not in ("bf16-mixed", "auto") or block.get("enabled") not in (True, "auto") or is_unset(checks):
            return NonFinite()
        action = "skip" if checks else "ignore"
        self._take(f"{self.bf16}.check_grad_overflow", f"nonfinite={action!r}")
        return NonFinite(action=action)

    def _reduce_dtype(self) -> str:
        dtype = dtype_of(self.good.get(_SENT))
        if dtype is not None:
            self._take(_SENT, f"reduce_dtype={dtype!r}")
        return dtype or "fp32"

    def _data_types(self, precision: str) -> str | None:
        block = {key: dtype_of(value) for key, value in self.blocks["data_types"].items() if not is_unset(value)}
        summed, stored, buffers = (block.get(f"{name}_dtype") for name in ("grad_accum", "param", "buffer"))
        halves = [name for name in ("fp16", self.bf16) if self.blocks[name].get("enabled") is True]
        computed = stored if precision == "auto" else dtype_of(halves[0]) if halves else "fp32"
        for key, value, allowed in (("grad_accum_dtype", summed, "fp32"), ("param_dtype", stored, computed)):
            if value not in (None, allowed):
                fix = f"remove data_types.{key} from the JSON"
                self.faults.add(f"data_types.{key}={value!r}", f"{allowed}, as the plan does", fix)
        if buffers is not None:
            self._take("data_types.buffer_dtype", f"buffer_dtype={buffers!r}")
        return buffers


def _decides_formats(key: str) -> bool:
    """Whether a top-level key decides a format or the loss scale, or was meant to."""
    known = (*_BLOCKS, _SENT)
    within = {name for block in _BLOCKS for name in schema.BLOCKS[block]} - {"enabled", "dtype"}
    meant = key in within or difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.7)
    return key in known or (key not in schema.BLOCKS[""] and bool(meant))
