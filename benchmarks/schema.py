"""The JSON schema of a training file, with which an editor completes keys and marks wrong ones, from the dataclasses.

``python -m benchmarks.schema`` writes it beside the shipped configs, whose first lines name it.
"""

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lightning_mp.policy import FP8, PRECISIONS, Checkpointing, NonFinite, Pin, PrecisionPolicy
from lightning_mp.policy.pieces import STORAGE_DTYPES, LossScaling
from lightning_mp.policy.precision_policy import PRESETS, TF32_SETTINGS
from lightning_mp.strategies.registry import PREFIX, STRATEGIES, trainer_arguments

FOLDER = Path(str(files("lightning_mp.configs"))) / "schema"
#: what every editor that knows schemas reads; Hydra's own header stands before it
MODELINE = "# yaml-language-server: $schema="
_JSON = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}
_INTERPOLATION = {"type": "string", "pattern": r"\$\{"}
_DTYPE = {"enum": list(STORAGE_DTYPES)}
#: fields that are written more freely, or more narrowly, than their annotations say
_WRITTEN: Mapping[str, Any] = {
    "precision": {"enum": [*PRECISIONS, "32", "16", "bf16", "fp16", 32, 16]},
    "tf32": {"enum": [*TF32_SETTINGS, None]},
    "dtype": _DTYPE,
    "output": {"enum": [*STORAGE_DTYPES, "pin", "input", None]},
    "accumulate": {"enum": ["fp32", None]},
    "reduce_dtype": _DTYPE,
    "buffer_dtype": {"enum": [*STORAGE_DTYPES, None]},
}


def plan_schema() -> dict[str, Any]:
    """That of a plan: the fields of the policy, with everything that each may be written as."""
    built = {"type": "object", "required": ["_target_"]}  # LossScaling.deepspeed and its kind
    pieces: dict[str, Any] = {
        "loss_scaling": _any(_piece(LossScaling), built, {"type": "null"}),
        "pins": _any(
            {"type": "object", "additionalProperties": _any(_DTYPE, _piece(Pin, "pattern"))},
            {"type": "array", "items": _piece(Pin)},
            {"type": "null"},
        ),
        "checkpointing": _any(_piece(Checkpointing), {"type": ["string", "null"]}),
        "fp8": _any(_piece(FP8), {"enum": [*get_args(get_type_hints(FP8)["recipe"]), None]}),
        "nonfinite": _any(_piece(NonFinite), {"enum": list(get_args(get_type_hints(NonFinite)["action"]))}),
    }
    return _piece(PrecisionPolicy, **pieces)


def train_schema() -> dict[str, Any]:
    """That of a training file; keys of the user's own, which others refer to, are allowed at its top."""
    called = {"type": ["object", "array", "string", "null"]}
    names = [*STRATEGIES, *(f"{PREFIX}{name}" for name in STRATEGIES)]
    by_name = {"type": "object", "properties": {"name": {"enum": names}}}
    properties = {
        "plan": _any({"enum": [*_WRITTEN["precision"]["enum"], *PRESETS]}, plan_schema()),
        "model": {"type": "object", "description": "_target_: a LightningModule's class, and its arguments"},
        "data": {**called, "description": "_target_: a LightningDataModule, or the keys train and val"},
        "strategy": _any({"enum": [*names, None]}, by_name),
        "trainer": {
            "type": "object",
            "properties": {key: {} for key in [*trainer_arguments(), "_target_"]},
            "additionalProperties": False,
        },
        "callbacks": called,
        "seed": {"type": ["integer", "null"], "minimum": 0},
        "ckpt_path": {"type": ["string", "null"], "description": "a checkpoint to resume, or last"},
        "run_dir": {"type": ["string", "null"], "description": "where the run writes; null: a new folder below runs/"},
    }
    return {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": properties}


def _piece(cls: Any, *without: str, **written: Any) -> dict[str, Any]:
    """The object of a dataclass; nothing but its fields, and what Hydra builds it with."""
    hints, said = get_type_hints(cls), _arguments(cls)
    properties: dict[str, Any] = {"_target_": {"type": "string"}}
    for name in (item.name for item in fields(cls) if item.name not in without):
        found = written.get(name) or _WRITTEN.get(name) or _of(hints[name])
        about = {"description": said[name]} if name in said else {}
        properties[name] = {**_any(found, _INTERPOLATION), **about}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _of(hint: Any) -> dict[str, Any]:
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Literal:
        return {"enum": list(parts)}
    if kind in (UnionType, Union):
        return _any(*map(_of, parts))
    return {"type": "array", "items": {"type": "string"}} if kind is tuple else {"type": _JSON[hint]}


def _any(*options: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(options)}


def _arguments(cls: Any) -> dict[str, str]:
    """What the docstring says of each argument."""
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    return {name: re.sub(r"\s+", " ", re.sub(r"``|:\w+:", "", text)) for name, text in found}


def write(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in {"train": train_schema(), "plan": plan_schema()}.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
