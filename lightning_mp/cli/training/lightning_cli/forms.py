"""The forms that plan and strategy may be written in, turned into the one that LightningCLI's parser knows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from jsonargparse import get_loader

from lightning_mp.policy import PRECISIONS, Checkpointing, NonFinite, Pin
from lightning_mp.policy.load import HYDRA_KEYS
from lightning_mp.policy.loss_scaling import LossScaling
from lightning_mp.policy.presets import PRESETS, preset
from lightning_mp.precision import MixedPrecisionPlan

CLASS = "class_path"
SUBCOMMANDS = ("fit", "validate", "test", "predict")
#: fields of a plan that have fields of their own
PIECES = {"loss_scaling": LossScaling, "pins": Pin, "checkpointing": Checkpointing, "nonfinite": NonFinite}
_FACTORY = "make_strategy"


def load(text: str) -> Any:
    """A YAML text as plain values, read as jsonargparse reads it; the text itself where it is no YAML."""
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        return text


def settle(config: Any, dropped: Collection[str] = ()) -> Any:
    """A config with plan and strategy in the form that the parser knows, without the keys ``dropped``.

    Those of a subcommand's own section (``fit: {plan: …}``) too.
    """
    if not isinstance(config, Mapping):
        return config
    found = {key: settle(value, dropped) if key in SUBCOMMANDS else value for key, value in _items(config)}
    for key, form in FORMS.items():
        if key in found:
            found[key] = form(found[key])
    for key in dropped:
        found = _without(found, key.split("."))
    return found


def _items(mapping: Any) -> list[tuple[str, Any]]:
    return list(cast("Mapping[str, Any]", mapping).items())


def _without(value: Any, parts: list[str]) -> Any:
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [
            _without(item, parts[1:]) if str(index) == parts[0] and parts[1:] else item
            for index, item in enumerate(items)
        ]
    if not isinstance(value, Mapping):
        return value
    if len(parts) == 1:
        return {key: item for key, item in _items(value) if str(key) != parts[0]}
    return {key: _without(item, parts[1:]) if str(key) == parts[0] else item for key, item in _items(value)}


def plan_form(plan: Any) -> Any:
    """A plan as a mapping: of a precision, of a preset's name, of a YAML file, of Hydra's form; else as it is."""
    if isinstance(plan, str):
        if plan in PRECISIONS:
            return {"precision": plan}
        if plan in PRESETS:
            return {key: value for key, value in preset(plan).to_dict().items() if value is not None}
        loaded = load(Path(plan).read_text(encoding="utf-8")) if Path(plan).is_file() else plan
        return plan_form(loaded) if isinstance(loaded, Mapping) else loaded
    if not isinstance(plan, Mapping):
        return plan
    fields = {key: _piece_form(value) for key, value in _items(plan)}
    if str(fields.get("_target_", "")).rpartition(".")[2] == MixedPrecisionPlan.__name__:
        fields = {key: value for key, value in fields.items() if key not in HYDRA_KEYS}
    return fields


def _piece_form(piece: Any) -> Any:
    if isinstance(piece, list):
        return [_piece_form(entry) for entry in cast("list[Any]", piece)]
    if not isinstance(piece, Mapping) or "_target_" not in piece:
        return piece
    target = str(piece["_target_"])
    fields = {key: value for key, value in _items(piece) if key not in HYDRA_KEYS}
    is_class = target.rpartition(".")[2] in {kind.__name__ for kind in PIECES.values()}
    return fields if is_class else {"class_path": target, "init_args": fields}


def strategy_form(strategy: Any) -> Any:
    """A strategy as a name or a mapping; of Hydra's form (the package's own groups) its keywords."""
    if not isinstance(strategy, Mapping):
        return strategy
    fields = dict(_items(strategy))
    if str(fields.get("_target_", "")).rpartition(".")[2] != _FACTORY:
        return fields
    return {key: value for key, value in fields.items() if key not in (*HYDRA_KEYS, "plan")}


#: the sections that may be written in several forms
FORMS = {"plan": plan_form, "strategy": strategy_form}
