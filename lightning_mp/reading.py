"""Configs as plain mappings, whatever they came as."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, cast

from lightning_mp.errors import Fault, PlanError


def plain_mapping(config: Mapping[str, Any] | str | PathLike[str] | Any) -> dict[str, Any]:
    """A dict of plain values from a mapping, an OmegaConf ``DictConfig`` or the path of a YAML file.

    ``_target_`` keys, with which Hydra names what to build, are left out.

    Raises:
        PlanError: no such file, or what it holds is no mapping.
    """
    from omegaconf import DictConfig, OmegaConf

    if isinstance(config, (str, PathLike)):
        path = Path(config)
        if not path.is_file():
            raise PlanError([Fault(f"config {str(path)!r}, which is no file", "a YAML file", "check the path")])
        config = OmegaConf.load(path)
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    if not isinstance(config, Mapping):
        fix = "write the plan's arguments as 'precision: bf16-mixed'"
        raise PlanError([Fault(f"a config of type {type(config).__name__}", "a mapping", fix)])
    return cast("dict[str, Any]", _without_targets(config))


def _without_targets(value: Any) -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {key: _without_targets(item) for key, item in items if key not in ("_target_", "_convert_")}
    if isinstance(value, list):
        return [_without_targets(item) for item in cast("list[Any]", value)]
    return value
