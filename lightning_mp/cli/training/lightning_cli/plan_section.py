"""The plan section of a LightningCLI config: its forms as one mapping, and its policy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import get_loader

from lightning_mp.errors import Faults, PlanError
from lightning_mp.policy import FP8, PRECISIONS, Checkpointing, NonFinite, Pin, PrecisionPolicy, precision_word
from lightning_mp.policy.load import plain_mapping
from lightning_mp.policy.loss_scaling import LossScaling
from lightning_mp.policy.places import Places, plan_fault
from lightning_mp.policy.presets import PRESETS, preset
from lightning_mp.policy.words import precision_fix

CLASS = "class_path"
#: fields of a plan that have fields of their own
PIECES = {"loss_scaling": LossScaling, "pins": Pin, "checkpointing": Checkpointing, "fp8": FP8, "nonfinite": NonFinite}


def load(text: str) -> Any:
    """A YAML text as plain values, read as jsonargparse reads it; the text itself where it is no YAML."""
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        return text


def policy(layers: Iterable[tuple[str, Any]], places: Places, faults: Faults) -> PrecisionPolicy | None:
    """The policy that ``layers`` describe, (dotted key below ``plan``, value) each, a later one over the earlier."""
    plan: Any = {}
    for key, value in layers:
        plan = _overlaid(plan, _fields(_nested(key, value)))
    where = places.of("plan")
    if isinstance(plan, str):
        fix = precision_fix(plan, (), PRESETS) if "." not in plan else "check the path"
        faults.add(f"plan={plan!r}{where}", ", ".join([*PRECISIONS, *PRESETS, "the path of a YAML file"]), fix)
    elif not isinstance(plan, Mapping):
        faults.add(f"plan: {plan!r}{where}", "a precision or a mapping of its fields", "write 'precision: bf16-mixed'")
    else:
        try:
            return PrecisionPolicy.from_dict(plain_mapping(cast("Any", plan)))
        except PlanError as error:
            # here a constructor is named by class_path
            named = [replace(fault, given=fault.given.replace("_target_", CLASS, 1)) for fault in error.faults]
            faults.extend(plan_fault(fault, places) for fault in named)
    return None


def _nested(key: str, value: Any) -> Any:
    # the rest of a pin's key is a pattern, and may have dots
    parts = ["pins", key.removeprefix("pins.")] if key.startswith("pins.") else key.split(".") if key else []
    for part in reversed(parts):
        value = {part: value}
    return value


def _fields(plan: Any) -> Any:
    """A plan as a mapping: of a precision, of a preset's name, of a YAML file; else as it is."""
    word = precision_word(plan)
    if word is not None:
        return {"precision": word}
    if isinstance(plan, str):
        if plan in PRESETS:
            return {key: value for key, value in preset(plan).to_dict().items() if value is not None}
        loaded = load(Path(plan).read_text(encoding="utf-8")) if Path(plan).is_file() else plan
        return _fields(loaded) if isinstance(loaded, Mapping) else loaded
    if not isinstance(plan, Mapping):
        return plan
    return {key: _piece(value) for key, value in cast("Mapping[str, Any]", plan).items()}


def _piece(piece: Any) -> Any:
    """A piece as Hydra writes it, which the policy can read."""
    if not isinstance(piece, Mapping) or CLASS not in piece:
        return piece
    spec = cast("Mapping[str, Any]", piece)
    return {"_target_": spec[CLASS], **(spec.get("init_args") or {})}


def _overlaid(old: Any, new: Any) -> Any:
    """``new`` over ``old``, key by key; another constructor replaces all of a piece, and a pin is added to a list."""
    if isinstance(old, list) and isinstance(new, Mapping):
        pins = cast("Mapping[str, Any]", new)
        return [*cast("list[Any]", old), *({"pattern": pattern, "dtype": dtype} for pattern, dtype in pins.items())]
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    before, after = cast("Mapping[str, Any]", old), cast("Mapping[str, Any]", new)
    if after.get("_target_", before.get("_target_")) != before.get("_target_"):
        return after
    return {**before, **{key: _overlaid(before[key], after[key]) if key in before else after[key] for key in after}}
