"""Folders of shards that torch.distributed.checkpoint wrote for Lightning's FSDP2 and FSDP1 strategies."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict  # pyright: ignore[reportPrivateUsage]

from lightning_mp.checkpoints import files
from lightning_mp.checkpoints.formats import SHARDED_EXTRA, CheckpointFormatError
from lightning_mp.checkpoints.names import plain_names
from lightning_mp.modules.patterns import plain_name

# where ModelParallelStrategy and FSDPStrategy put the weights
_WEIGHTS = ("state_dict", "model")
_OPTIMIZER = "optimizer_"


def weights(path: Path) -> dict[str, Any]:
    """The full state dict, whole tensors on the CPU; optimizer states are not read."""
    metadata = _metadata(path)
    key = _weights_key(path, metadata)
    return plain_names(_assembled(path, {key})[key])


def entries(path: Path) -> list[str]:
    """The dotted names of everything in the shards."""
    return list(_metadata(path).state_dict_metadata)


def checkpoint(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Everything, as Lightning's single file has it."""
    metadata = _metadata(path)
    key = _weights_key(path, metadata)
    content = _assembled(path, None)
    indices = sorted(int(name.removeprefix(_OPTIMIZER)) for name in content if name.startswith(_OPTIMIZER))
    return {
        **files.load(path / SHARDED_EXTRA, weights_only=weights_only),
        "state_dict": plain_names(content[key]),
        "optimizer_states": [_by_position(content[f"{_OPTIMIZER}{index}"]) for index in indices],
    }


def _metadata(path: Path) -> Metadata:
    try:
        metadata = FileSystemReader(path).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise files.damaged(path, error) from error
    stored: dict[Any, Any] = metadata.storage_data or {}
    missing = sorted({str(info.relative_path) for info in stored.values() if not (path / info.relative_path).is_file()})
    if missing:
        raise CheckpointFormatError(
            f"{str(path)!r}, a folder of shards without {', '.join(missing)}",
            "a folder with every rank's shard",
            "copy the shards of all nodes into it, or take an earlier checkpoint",
        )
    return metadata


def _weights_key(path: Path, metadata: Metadata) -> str:
    roots = dict.fromkeys(str(place[0]) for place in (metadata.planner_data or {}).values())
    found = [key for key in _WEIGHTS if key in roots]
    if not found:
        raise CheckpointFormatError(
            f"{str(path)!r}, whose shards hold {', '.join(roots) or 'nothing'}",
            "shards of " + " or ".join(_WEIGHTS),
            "give a checkpoint that Lightning's Trainer wrote",
        )
    return found[0]


def _assembled(path: Path, keys: set[str] | None) -> dict[str, Any]:
    # The index alone says how large every tensor is: neither a model nor a process group is needed, and where there is
    # a group, each rank reads for itself.
    content: dict[str, Any] = {}
    try:
        planner = _EmptyStateDictLoadPlanner(keys=keys)
        _load_state_dict(content, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    except CheckpointException as error:  # holds one error a rank; there is one rank here
        raise files.damaged(path, next(iter(error.failures.values()))[0]) from error
    return content


def _by_position(optimizer: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the place of each parameter in its groups, as ``Optimizer.load_state_dict`` wants it."""
    groups: list[dict[str, Any]] = optimizer["param_groups"]
    names = [plain_name(str(name)) for group in groups for name in group["params"]]
    places = {name: place for place, name in enumerate(names)}
    numbers = iter(range(len(names)))
    state: dict[str, Any] = optimizer.get("state", {})  # absent where the optimizer keeps none
    return {
        "state": {places[plain_name(str(name))]: values for name, values in state.items()},
        "param_groups": [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups],
    }
