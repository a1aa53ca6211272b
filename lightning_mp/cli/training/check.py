"""A composed config, looked at as a whole before anything is built: every fault with the place it was written at."""

from __future__ import annotations

import re
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, cast

from lightning_mp.cli.training import targets
from lightning_mp.cli.training.compose import Composed
from lightning_mp.cli.training.primary import SECTIONS, SETTINGS
from lightning_mp.cli.training.targets import HYDRA_KEYS
from lightning_mp.compat.lightning import Trainer
from lightning_mp.errors import Faults, did_you_mean, nearest
from lightning_mp.policy.places import Places

_NEEDED = {
    "model": "write 'model:' and below it '_target_: package.Class', or choose one of the group: model=llama_tiny",
    "plan": "write 'plan:' and below it 'precision: bf16-mixed', or choose one of the group: plan=bf16",
}
#: what arguments of the Trainer that take nothing else are checked for: Lightning compares them unchecked
_KINDS: dict[Any, str] = {int: "an integer", float: "a number", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, slots=True)
class _Words:
    """What a fault of a value needs: every key there is, sections that are known to be missing, and places."""

    keys: list[str]
    missing: list[str]
    places: Places


def check(
    composed: Composed, faults: Faults, *, needed: Collection[str] = tuple(_NEEDED), only: Collection[str] | None = None
) -> dict[str, Any]:
    """The config as plain, resolved values; with faults what of it could be read, and every fault noted.

    Looked for: values that are missing or do not resolve, sections that are missing, ``_target_`` that name nothing,
    keys that what they name does not take, arguments it needs, and Trainer arguments; the plan is looked at where it is
    built. ``needed`` are the sections that have to be there; with ``only``, the others are neither looked at nor given
    back.
    """
    config, places = composed.config, composed.places
    written = targets.plain(config)
    before = len(faults.found)
    missing = [name for name in needed if not written.get(name)]
    for name in missing:
        near = nearest(name, [key for key in written if key not in (*SECTIONS, *SETTINGS)], 1)
        fix = f"call it {name}: {near}" if near else _NEEDED[name]
        faults.add(f"no {name}{places.of(near[1:-1])}", f"a {name} section", fix)
    words = _Words(sorted(_keys(written)), missing, places)
    kept = [name for name in written if only is None or name in only]
    _check_values(config, kept, "", words, faults)
    written = {name: written[name] for name in kept}
    _check_targets(written, "", places, faults)
    _check_trainer(written.get("trainer"), places, faults, under_plan=bool(written.get("plan")))
    if len(faults.found) == before:
        return {name: _resolved(config, name) for name in kept}
    return {name: _resolvable(value) if name == "plan" else value for name, value in written.items()}


def _resolved(config: Any, name: str) -> Any:
    """A section's plain value, resolved where it stands: what it refers to may lie in another."""
    from omegaconf import OmegaConf

    value = config[name]
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


# ---------------------------------------------------------------------- values


def _check_values(config: Any, keys: Iterable[Any], prefix: str, words: _Words, faults: Faults) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    for key in keys:
        path = f"{prefix}.{key}" if prefix else str(key)
        if OmegaConf.is_missing(config, key):
            faults.add(f"{path}: ???{words.places.of(path)}", "a value", f"give it one: {path}=...")
            continue
        try:
            value = config[key]
        except InterpolationToMissingValueError:
            continue  # a fault where the missing value stands
        except OmegaConfBaseException as error:
            _unresolved(error, path, words, faults)
            continue
        if OmegaConf.is_config(value) and not OmegaConf.is_interpolation(config, key):
            below = range(len(value)) if OmegaConf.is_list(value) else list(value.keys())
            _check_values(value, below, path, words, faults)


def _unresolved(error: Exception, path: str, words: _Words, faults: Faults) -> None:
    said, where = str(error).partition("\n")[0], words.places.of(path)
    if "Recursive" in said:
        faults.add(f"{path}{where}, which leads back to itself", "a value", "break the loop of ${...}")
        return
    wanted = re.search(r"Interpolation key '(.*)' not found", said)
    if wanted and wanted.group(1) in words.missing:
        return  # which is a fault already
    fix = did_you_mean(wanted.group(1) if wanted else "", words.keys, "give every ${...} a target")
    faults.add(f"{path}{where}: {said}", "a value that resolves", fix)


def _keys(value: Any, prefix: str = "") -> list[str]:
    """Every dotted key."""
    if not isinstance(value, Mapping):
        return []
    found: list[str] = []
    for key, item in cast("Mapping[str, Any]", value).items():
        path = f"{prefix}{key}"
        found += [path, *_keys(item, f"{path}.")]
    return found


# ---------------------------------------------------------------------- targets and their keys


def _check_targets(value: Any, path: str, places: Places, faults: Faults) -> None:
    if isinstance(value, list):
        for index, item in enumerate(cast("list[Any]", value)):
            _check_targets(item, f"{path}.{index}", places, faults)
    if not isinstance(value, Mapping):
        return
    given = cast("Mapping[str, Any]", value)
    target = given.get("_target_")
    if isinstance(target, str) and "${" not in target and target != "???":
        _check_target(target, given, path, places, faults)
    elif target is None and "class_path" in given:
        where = places.of(f"{path}.class_path")
        fix = "write _target_ and its arguments next to it"
        faults.add(f"{path}.class_path{where}, which is LightningCLI's", "_target_", fix)
    for key, item in given.items():
        _check_targets(item, f"{path}.{key}" if path else key, places, faults)


def _check_target(target: str, given: Mapping[str, Any], path: str, places: Places, faults: Faults) -> None:
    taken = targets.taken(target, f"{path}._target_", places, faults)
    if taken is None or taken is targets.UNKNOWN or path.partition(".")[0] in ("plan", "trainer"):
        return  # it takes anything; or what it takes is checked in full elsewhere
    targets.unknown_arguments((key for key in given if key not in HYDRA_KEYS), taken, path, places, faults)
    if given.get("_partial_") or given.get("_args_"):
        return
    for name in (one.name for one in taken if one.default is Parameter.empty and one.name not in given):
        faults.add(f"{path}{places.of(path)} without {name!r}", f"what {target} needs", f"give it: {path}.{name}=...")


def _check_trainer(given: Any, places: Places, faults: Faults, *, under_plan: bool) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        faults.add(f"trainer: {given!r}{places.of('trainer')}", "a mapping of Trainer arguments", "max_steps: 100")
        return
    known = [*targets.trainer_arguments(), *(() if under_plan else targets.ELSEWHERE)]
    for key in (key for key in cast("Mapping[str, Any]", given) if key not in known and key not in HYDRA_KEYS):
        fix = targets.ELSEWHERE.get(key) or did_you_mean(key, known, "remove it")
        faults.add(f"trainer.{key}{places.of(f'trainer.{key}')}", "an argument of Lightning's Trainer", fix)
    kinds = typing.get_type_hints(Trainer.__init__)
    for key, value in cast("Mapping[str, Any]", given).items():
        allowed = {*(typing.get_args(kinds.get(key)) or (kinds.get(key),))}
        if allowed and allowed <= _KINDS.keys() and isinstance(value, str) and "${" not in value:
            words = " or ".join(word for kind, word in _KINDS.items() if kind in allowed)
            where = f"trainer.{key}={value!r}{places.of(f'trainer.{key}')}"
            example = "10" if int in allowed else "true"
            faults.add(where, words, f"write it as in trainer.{key}={example}, or leave the key out")


def _resolvable(plan: Any) -> Any:
    """A plan as written, without what does not resolve, which is a fault already."""
    if not isinstance(plan, Mapping):
        return plan
    fields = cast("Mapping[str, Any]", plan)
    return {key: value for key, value in fields.items() if not re.search(r"\$\{|\?\?\?", str(value))}
