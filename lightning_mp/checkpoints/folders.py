"""Checkpoints that are folders: shards of torch.distributed.checkpoint, and DeepSpeed's, whole again on the CPU."""

from __future__ import annotations

import logging
import pickle
import shutil
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from lightning_mp.checkpoints import formats
from lightning_mp.checkpoints.formats import (
    OPTIMIZER,
    SHARDED_EXTRA,
    deepspeed_folder,
    is_remote_path,
    plain_names,
    rekeyed,
)
from lightning_mp.compat.torch import read_shards, shard_storage
from lightning_mp.errors import MissingExtraError
from lightning_mp.modules.patterns import plain_name

# ------------------------------------------------------------------ written beside, then put in place


def unfinished(target: str) -> str:
    """Where a folder is written until it is whole: written over in place, it could hold parts of two steps.

    A bucket renames nothing: there it is written in place, once it is without an index, which comes last.
    """
    return target if is_remote_path(target) else str(_beside(Path(target), "unfinished"))


def begin(target: str) -> None:
    """Delete what a process that was killed left beside ``target``, or in a bucket the index of what is there."""
    if is_remote_path(target):
        return formats.remove_index(target)
    for word in ("unfinished", "whole", "old"):
        shutil.rmtree(_beside(Path(target), word), ignore_errors=True)
    return None


def finish(target: str) -> None:
    """Put what is whole by now in the place of ``target``; each node calls it, as each may have a disk of its own.

    A folder takes no other's place in one call: killed between two, both are there, and neither is at ``target``.
    """
    if is_remote_path(target):
        return
    path = Path(target)
    whole, old = _beside(path, "whole"), _beside(path, "old")
    try:
        Path(unfinished(target)).rename(whole)
    except FileNotFoundError:  # on a shared disk another node was first
        return
    if path.is_dir() and not path.is_symlink():
        path.rename(old)
    else:
        path.unlink(missing_ok=True)
    whole.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _beside(path: Path, word: str) -> Path:
    """A name that nobody takes for a checkpoint's: ModelCheckpoint looks for ``last`` in names."""
    return path.with_name(f".{word}-{crc32(path.name.encode()):08x}")


# ------------------------------------------------------------------ shards, as FSDP2 and Lightning's FSDP1 write them

# where ModelParallelStrategy and FSDPStrategy put the weights
_WEIGHTS = ("state_dict", "model")


def sharded_weights(path: Path) -> dict[str, Any]:
    """The full state dict, whole tensors on the CPU; optimizer states are not read."""
    key = _weights_key(path, _metadata(path))
    return plain_names(_assembled(path, {key})[key])


def entries(path: str) -> list[str]:
    """The dotted names of everything in the shards, behind any protocol of fsspec's."""
    index = shard_storage(path).read_metadata() if is_remote_path(path) else _metadata(Path(path))
    return list(index.state_dict_metadata)


def sharded_checkpoint(path: Path, weights_only: bool | None) -> dict[str, Any]:
    """Everything, as Lightning's single file has it."""
    key, content = _weights_key(path, _metadata(path)), _assembled(path)
    indices = sorted(int(name.removeprefix(OPTIMIZER)) for name in content if name.startswith(OPTIMIZER))
    return {
        **formats.load(path / SHARDED_EXTRA, weights_only=weights_only),
        "state_dict": plain_names(content[key]),
        "optimizer_states": [rekeyed(content[f"{OPTIMIZER}{index}"]) for index in indices],
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


def _assembled(path: Path, keys: set[str] | None = None) -> dict[str, Any]:
    try:
        return read_shards(path, keys)
    except CheckpointException as error:  # holds one error a rank; there is one rank here
        raise formats.damaged(path, next(iter(error.failures.values()))[0]) from error


# ------------------------------------------------------------------ DeepSpeed's: fp32 weights out of the masters

LEFT_OUT = (
    "DeepSpeed stores optimizer state as one flat partition per rank, which only the same number of ranks at the same "
    "ZeRO stage can load (1 and 2 count as one); here optimizer state starts from scratch."
)

# What DeepSpeedEngine puts beside Lightning's own keys.
_OWN = frozenset({
    "module", "optimizer", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_config", "ds_version",
})  # fmt: skip


def resumable(path: Path, stage: int, processes: int) -> bool:
    """Whether DeepSpeed itself can resume from a folder: stages 1 and 2 write alike, and each rank loads its partition.

    Raises:
        CheckpointFormatError: files are missing.
    """
    folder = deepspeed_folder(path)
    whole = (folder / "mp_rank_00_model_states.pt").is_file()
    return whole == (stage < 3) and len(list(folder.glob("*_optim_states.pt"))) == processes


def loads_alike(path: Path, groups: list[list[str]]) -> bool:
    """Whether the param groups of a folder of stage 1 or 2 hold the parameters of those ``groups``, by name."""
    states = _model_states(path, deepspeed_folder(path))
    return [[plain_name(name) for name in group] for group in states.get("param_shapes") or ()] == groups


def deepspeed_checkpoint(path: Path) -> dict[str, Any]:
    """Everything but the optimizer states, as Lightning's single file has it.

    Raises:
        CheckpointFormatError: files are missing or damaged, or hold no module.
        MissingExtraError: DeepSpeed is not installed; its files hold its classes.
    """
    masters_of = _tool()
    folder = deepspeed_folder(path)
    states = _model_states(path, folder)
    state_dict = plain_names(_full(path, states, lambda: _masters(path, folder, masters_of)))
    record: Mapping[str, Any] = states.get("lightning_mp") or {}
    return {
        **{key: value for key, value in states.items() if key not in _OWN},
        "state_dict": _as_recorded(state_dict, record.get("dtypes", {})),
        "optimizer_states": [],
        "optimizer_left_out": LEFT_OUT,
    }


def _tool() -> Callable[..., dict[str, Tensor]]:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # on import DeepSpeed says at length which device it found
    try:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
    except ImportError:
        raise MissingExtraError("deepspeed", "deepspeed", "reading a DeepSpeed checkpoint") from None
    finally:
        logging.disable(before)
    return cast("Callable[..., dict[str, Tensor]]", get_fp32_state_dict_from_zero_checkpoint)


def _model_states(path: Path, folder: Path) -> dict[str, Any]:
    candidates = [folder / "mp_rank_00_model_states.pt", folder / "zero_pp_rank_0_mp_rank_00_model_states.pt"]
    found = [file for file in candidates if file.is_file()]
    if not found:
        raise formats.damaged(path, "it lacks the model states of rank 0: copy the files of all nodes into it")
    states = formats.load(found[0], weights_only=False, mmap=True)
    if not isinstance(states.get("module"), dict):
        raise formats.damaged(path, f"{found[0].name} holds no module")
    return states


def _full(path: Path, states: Mapping[str, Any], masters: Callable[[], dict[str, Tensor]]) -> dict[str, Any]:
    """The engine's state dict, with what ZeRO split or keeps more exactly put in; buffers stay as they are."""
    state_dict: dict[str, Any] = states["module"]
    groups: list[Mapping[str, Any]] = [*(states.get("param_shapes") or ()), states.get("frozen_param_shapes") or {}]
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    if not shapes:  # stage 0: DDP by another name
        return state_dict
    shared: Mapping[str, str] = states.get("shared_params") or {}
    shapes |= {name: shapes[other] for name, other in shared.items() if other in shapes}
    rebuilt = masters()
    full: dict[str, Any] = {
        name: rebuilt.get(name, value) if name in shapes else value for name, value in state_dict.items()
    }
    # Under stage 3 the engine's own entries are empty: none may be left.
    wrong = [name for name, shape in shapes.items() if name in full and tuple(full[name].shape) != shape]
    if wrong:
        raise formats.damaged(path, f"its parts do not make up {wrong[0]!r}")
    return full


def _masters(path: Path, folder: Path, tool: Callable[..., dict[str, Tensor]]) -> dict[str, Tensor]:
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it prints, and draws progress bars
            found = tool(str(folder.parent), tag=folder.name)
    except (ValueError, OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise formats.damaged(path, error) from error
    # The masters were saved as what the optimizer steps: with requires_grad, which what is cut out of them inherits.
    return {name: tensor.detach() for name, tensor in found.items()}


def _as_recorded(state_dict: dict[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Floating tensors in the dtype recorded for their name; tied tensors stay tied."""
    wanted = {plain_name(name): dtype for name, dtype in dtypes.items()}
    made: dict[tuple[int, torch.Size, str], Tensor] = {}
    for name, value in state_dict.items():
        if name in wanted and isinstance(value, Tensor) and value.is_floating_point():
            key = value.data_ptr(), value.shape, wanted[name]
            made.setdefault(key, value.to(formats.STORAGE[wanted[name]]))
            state_dict[name] = made[key]
    return state_dict
