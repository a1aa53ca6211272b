"""Folders of shards that torch.distributed.checkpoint wrote for Lightning's FSDP2 and FSDP1 strategies."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from lightning_mp.checkpoints import formats
from lightning_mp.checkpoints.formats import SHARDED_EXTRA, plain_names, rekeyed

# where ModelParallelStrategy and FSDPStrategy put the weights
_WEIGHTS = ("state_dict", "model")
_OPTIMIZER = "optimizer_"


def weights(path: Path) -> dict[str, Any]:
    """The full state dict, whole tensors on the CPU; optimizer states are not read."""
    metadata = _metadata(path)
    key = _weights_key(path, metadata)
    return plain_names(_assembled(path, metadata, key)[key])


def entries(path: Path) -> list[str]:
    """The dotted names of everything in the shards."""
    return list(_metadata(path).state_dict_metadata)


def checkpoint(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Everything, as Lightning's single file has it."""
    metadata = _metadata(path)
    key = _weights_key(path, metadata)
    content = _assembled(path, metadata)
    indices = sorted(int(name.removeprefix(_OPTIMIZER)) for name in content if name.startswith(_OPTIMIZER))
    return {
        **formats.load(path / SHARDED_EXTRA, weights_only=weights_only),
        "state_dict": plain_names(content[key]),
        "optimizer_states": [rekeyed(content[f"{_OPTIMIZER}{index}"]) for index in indices],
    }


def _metadata(path: Path) -> Metadata:
    try:
        metadata = FileSystemReader(path).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise formats.damaged(path, error) from error
    stored: dict[Any, Any] = metadata.storage_data or {}
    missing = sorted({str(info.relative_path) for info in stored.values() if not (path / info.relative_path).is_file()})
    if missing:
        raise formats.damaged(path, f"it lacks {', '.join(missing)}: copy the shards of all nodes into it")
    return metadata


def _weights_key(path: Path, metadata: Metadata) -> str:
    roots = dict.fromkeys(str(place[0]) for place in (metadata.planner_data or {}).values())
    found = [key for key in _WEIGHTS if key in roots]
    if not found:
        raise formats.damaged(path, f"its shards hold {', '.join(roots) or 'nothing'}, and no weights")
    return found[0]


def _assembled(path: Path, metadata: Metadata, root: str | None = None) -> dict[str, Any]:
    """What is stored, or only what is below ``root``, as whole tensors on the CPU."""
    # The index alone says how large every tensor is: neither a model nor a process group is needed, and where there is
    # a group, each rank reads for itself.
    places: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
    wanted = [name for name in metadata.state_dict_metadata if root is None or places.get(name, (name,))[0] == root]
    flat = {name: _room(metadata.state_dict_metadata[name]) for name in sorted(wanted)}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(flat, storage_reader=FileSystemReader(path), planner=planner, no_dist=True)
    except CheckpointException as error:  # holds one error a rank; there is one rank here
        raise formats.damaged(path, next(iter(error.failures.values()))[0]) from error
    content: dict[str, Any] = {}
    for name in wanted:
        _put(content, places.get(name, (name,)), flat[name])
    return content


def _room(stored: Any) -> Tensor | None:
    return (
        torch.empty(stored.size, dtype=stored.properties.dtype) if isinstance(stored, TensorStorageMetadata) else None
    )


def _put(content: Any, place: Sequence[str | int], value: Any) -> None:
    """Set ``content[place[0]][place[1]]...``, where a number is a place in a list."""
    for key, below in zip(place, (*place[1:], None), strict=True):
        in_list = isinstance(content, list)
        if in_list:
            content.extend(None for _ in range(len(content), int(key) + 1))
        if below is None:
            content[key] = value
            return
        there = content[key] if in_list else content.get(key)
        if there is None:
            there = content[key] = [] if isinstance(below, int) else {}
        content = there
