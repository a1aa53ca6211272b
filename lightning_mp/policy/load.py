"""Configs as plain mappings, whatever they came as."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from lightning_mp.errors import Fault, Faults, PlanError
from lightning_mp.policy.loss_scaling import LossScaling
from lightning_mp.policy.words import precision_word

#: what a ``_target_`` may name besides a class whose fields are written out, and what builds it
_CONSTRUCTORS: Mapping[str, Callable[..., LossScaling]] = {
    f"LossScaling.{build.__name__}": build
    for build in (LossScaling.torch, LossScaling.deepspeed, LossScaling.megatron, LossScaling.static)
}
_CLASSES = ("MixedPrecisionPlan", "PrecisionPolicy", "LossScaling", "Pin", "Checkpointing", "NonFinite", "FP8")
#: keys with which Hydra says what a mapping is built as
HYDRA_KEYS = ("_target_", "_convert_", "_recursive_")


def plain_mapping(config: Mapping[str, Any] | str | PathLike[str] | Any) -> dict[str, Any]:
    """A dict of plain values from a mapping, an OmegaConf ``DictConfig``, the path of a YAML file, or a precision.

    ``_target_`` keys, with which Hydra names what to build, are read: those of a class are left out, since its
    fields say the same; ``LossScaling.deepspeed`` and its kind are called.

    Raises:
        PlanError: no such file, a file that is no YAML mapping, a missing value, an interpolation that leads nowhere, a
            ``_target_`` that is none of this package's; all faults of one kind together.
    """
    faults = Faults()
    loaded, path = _loaded(config), repr(str(config)) if isinstance(config, (str, PathLike)) else None
    plain = _resolved(loaded, path or "a mapping")
    if not isinstance(plain, Mapping):
        kind = (
            f"config {path}, which holds a {type(plain).__name__}"
            if path
            else f"a config of type {type(loaded).__name__}"
        )
        raise PlanError([Fault(kind, "a mapping", "write the plan's arguments as 'precision: bf16-mixed'")])
    built = _built(plain, "", faults)
    faults.raise_if_any()
    return cast("dict[str, Any]", built)


def _loaded(config: Any) -> Any:
    if isinstance(config, Mapping):
        return cast("Any", config)
    if precision_word(config) and not Path(str(config)).is_file():
        return {"precision": config}
    if not isinstance(config, (str, PathLike)):
        return config
    from omegaconf import OmegaConf
    from yaml import YAMLError

    path = Path(cast("str", config))
    if not path.is_file():
        raise PlanError([Fault(f"config {str(path)!r}, which is no file", "a YAML file", "check the path")])
    try:
        return OmegaConf.load(path)
    except (YAMLError, OSError, ValueError) as error:
        text = " ".join(str(error).split())
        raise PlanError([Fault(f"config {str(path)!r}: {text}", "a YAML mapping", "fix the file")]) from error


def _resolved(config: Any, name: str) -> Any:
    from omegaconf import Container, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not isinstance(config, Container):
        return config
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        given = f"{error.full_key} of {name}, which does not resolve: {str(error).splitlines()[0]}"
        fix = "give every '???' a value and every ${...} a target"
        raise PlanError([Fault(given, "values for every key", fix)]) from error


def _built(value: Any, path: str, faults: Faults) -> Any:
    if isinstance(value, list):
        return [_built(item, path, faults) for item in cast("list[Any]", value)]
    if not isinstance(value, Mapping):
        return value
    given = cast("Mapping[str, Any]", value)
    fields = {key: _built(item, f"{path}{key}.", faults) for key, item in given.items() if key not in HYDRA_KEYS}
    target = given.get("_target_")
    if target is None or str(target).rpartition(".")[2] in _CLASSES:
        return fields
    build = _CONSTRUCTORS.get(".".join(str(target).split(".")[-2:]))
    if build is None:
        allowed = ", ".join([*_CLASSES, *_CONSTRUCTORS])
        faults.add(f"{path}_target_: {target}", f"lightning_mp's {allowed}", "name one of these")
        return fields
    try:
        return build(**fields)
    except PlanError as error:
        faults.extend(error.faults)
    except TypeError as error:
        faults.add(f"{path}_target_: {target} with {sorted(fields)}", "the arguments of that constructor", str(error))
    return fields
