"""Functions that read a checkpoint of any format into one dict, or write its weights to a file."""

import pickle
import secrets
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from lightning_mp.checkpoints import formats
from lightning_mp.checkpoints.formats import (
    OPTIMIZER,
    SHARDED_EXTRA,
    CheckpointFormatError,
    deepspeed_folder,
    kind_of,
    plain_names,
    rekeyed,
)
from lightning_mp.compat import quietly
from lightning_mp.compat.torch import read_shards, shard_storage
from lightning_mp.errors import Faults, MissingExtraError
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics.dtypes import TORCH_DTYPES, map_tensors
from lightning_mp.policy.pieces import storage_dtype
from lightning_mp.record import file_format

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def consolidate(
    checkpoint: str | PathLike[str],
    output: str | PathLike[str],
    dtype: object = None,
    *,
    prefix: str = "",
    cast_all: bool = False,
    weights_only: bool | None = None,
) -> Path | str:
    """Write the weights of ``checkpoint`` to ``output`` as a plain dict of names and tensors.

    Entries that are no tensors are left out, with a warning that names them.

    Args:
        checkpoint: a ``.ckpt`` file of Lightning, a folder of shards, or a folder of DeepSpeed's.
            It is a path, or an address that fsspec reads (``s3://...``). The contents of an address
            are copied to a temporary folder first.
        output: a path or an address. Its ending is ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` for
            ``torch.save``, or ``.safetensors``. An existing file is replaced once the new one is
            complete.
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or another spelling of one. Floating tensors are
            cast to it, except weights that the plan of the run, or the model, keeps in fp32. By
            default, each tensor keeps its dtype. Weights of DeepSpeed are then the fp32 masters,
            unless the checkpoint records their declared dtypes.
        prefix: write only names below this one, without it. ``"model."`` gives a file for
            ``transformers`` if the LightningModule calls its model ``self.model``.
        cast_all: cast the weights that are kept in fp32, too.
        weights_only: as for ``torch.load``. ``False`` unpickles objects, so use it for a checkpoint
            you trust. Indexes of shards and all files of DeepSpeed are unpickled in any case.

    Returns:
        The output's path, or its address.

    Raises:
        CheckpointFormatError: the checkpoint cannot be read, or no tensor is below ``prefix``. Or
            the output has an unknown ending, or is a folder or the checkpoint itself.
        FileNotFoundError: nothing is at a remote address.
        PlanError: ``dtype`` is no storage format.
        MissingExtraError: safetensors or DeepSpeed is needed and not installed.
    """
    _, left_out = write_consolidated(checkpoint, output, dtype, prefix, cast_all, weights_only)
    if left_out:
        warnings.warn(f"{output}: no tensors, so left out: {', '.join(left_out)}", stacklevel=2)
    return str(output) if formats.is_remote_path(output) else Path(output)


def write_consolidated(
    checkpoint: Any, output: Any, dtype: object, prefix: str, cast_all: bool, weights_only: bool | None
) -> tuple[dict[str, Tensor], list[str]]:
    """Write as :func:`consolidate` does, and return the written tensors and the skipped names.

    An entry is skipped if it is no tensor. No warning is given.
    """
    wanted = None
    if dtype is not None:
        with Faults("dtype") as faults:
            wanted = storage_dtype(dtype, "dtype", faults)
    with formats.local(checkpoint) as source, formats.local(output, writes=True) as target:
        save = _writer(target)
        if target.is_dir() or (target.exists() and source.exists() and target.samefile(source)):
            given = f"the output {str(target)!r} is a folder or the checkpoint itself"
            raise CheckpointFormatError(given, "choose another name")
        keeps_some = wanted in ("bf16", "fp16") and not cast_all
        content = _read(source, weights_only, states=False, extra=keeps_some)
        fp32 = _fp32_names(source, content, wanted) if keeps_some else ()
        dtypes = {name: TORCH_DTYPES["fp32" if name in fp32 else wanted] for name in content["state_dict"] if wanted}
        weights = _under(content["state_dict"], prefix, source)
        tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
        if not tensors:
            raise CheckpointFormatError(f"{str(source)!r} has no tensor in it", "check the path")
        dtypes = _under(dtypes, prefix, source) if dtypes else {}
        plain = _plain(tensors, dtypes, tied=target.suffix != ".safetensors")
        _write_whole(plain, target, save)
    return plain, [name for name in weights if name not in tensors]


def _writer(output: Path) -> Callable[[dict[str, Tensor], Path], Any]:
    """Return the function that writes tensors to a file with the ending of ``output``.

    Raises:
        CheckpointFormatError: the ending is unknown.
        MissingExtraError: safetensors is not installed.
    """
    if output.suffix not in _SUFFIXES:
        raise CheckpointFormatError(f"the output {str(output)!r}", "add an ending", ", ".join(_SUFFIXES))
    if output.suffix != ".safetensors":
        return torch.save
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtraError("safetensors", "hf", "writing .safetensors") from None

    # transformers looks for this entry before it loads the file.
    return partial(save_file, metadata={"format": "pt"})


def _fp32_names(source: Path, checkpoint: Mapping[str, Any], half: Any) -> set[str]:
    """Return the names of weights that the plan recorded as fp32 for a file in ``half``.

    The plan's state is known by its keys, because a subclass may have any name.

    Raises:
        CheckpointFormatError: a newer release of this package wrote the plan's state.
    """
    states = [state for state in checkpoint.values() if isinstance(state, dict) and {"policy", "fp32"} <= state.keys()]
    for said in filter(None, map(file_format.newer, states)):
        raise CheckpointFormatError(
            f"the plan's state in {str(source)!r} {said}", f"{file_format.UPDATE}, or cast all of it: --all"
        )
    return {name for state in states for name in state["fp32"].get(half, ())}


def _under(weights: Mapping[str, Any], prefix: str, source: Path) -> dict[str, Any]:
    """Return the entries below ``prefix``, with the prefix removed from their names.

    Raises:
        CheckpointFormatError: nothing is below ``prefix``.
    """
    start = f"{prefix.rstrip('.')}." if prefix else ""
    below = {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
    if prefix and not below:
        known = ", ".join(dict.fromkeys(name.partition(".")[0] + "." for name in weights if "." in name))
        raise CheckpointFormatError(f"the prefix {prefix!r} of {str(source)!r}", "write another", known or "none")
    return below


def _plain(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], *, tied: bool) -> dict[str, Tensor]:
    """Return the tensors contiguous, and floating ones cast to their dtype in ``dtypes``.

    Tied names share a tensor if ``tied``, and have copies otherwise.
    """
    made: dict[tuple[Any, ...], Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = (*place, tensor.shape, tensor.stride(), tensor.dtype)
        again = made.get(key)
        if again is None:
            cast = dtypes.get(name, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
            own = tensor.detach().to(cast).contiguous()
            # torch.save writes the whole storage of a view.
            made[key] = own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
        plain[name] = made[key] if tied or again is None else again.clone()
    return plain


def _write_whole(tensors: dict[str, Tensor], output: Path, save: Callable[[dict[str, Tensor], Path], Any]) -> None:
    """Write a temporary file beside ``output``, and rename it to ``output`` once it is complete."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        unfinished.touch()
        mode = unfinished.stat().st_mode
        save(tensors, unfinished)
        unfinished.chmod(mode)  # safetensors makes files that only their owner may read
        unfinished.replace(output)
    finally:
        unfinished.unlink(missing_ok=True)


# ------------------------------------------------------------------ reading, in this process alone


def read_full(path: str | PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
    """Return the checkpoint at ``path`` in the form of Lightning's single file.

    All tensors are unsharded and on the CPU.
    ``state_dict`` has all weights, under the LightningModule's names without wrappers
    (``_orig_mod.`` and the like). ``optimizer_states`` fit plain ``Optimizer.load_state_dict``.
    They are empty for a DeepSpeed checkpoint, and ``optimizer_left_out`` has the reason. Other keys
    are as saved, except that DeepSpeed's own are left out. No process group is needed, and no
    collective is called.

    ``weights_only`` is passed to ``torch.load`` for the single file, and for the part of a sharded
    checkpoint without tensors. The index of a sharded checkpoint and all files of DeepSpeed are
    unpickled in any case: read only those you trust.

    Raises:
        CheckpointFormatError: ``path`` has no checkpoint, or an incomplete one. ``weights_only``
            forbids its objects, or a newer release of this package wrote it.
        FileNotFoundError: nothing is at a remote address.
        MissingExtraError: the checkpoint is DeepSpeed's, and DeepSpeed is not installed.
    """
    with formats.local(path) as place:
        return _read(place, weights_only)


def _read(path: Path, weights_only: bool | None, *, states: bool = True, extra: bool = True) -> dict[str, Any]:
    """Return the content that :func:`read_full` returns, from a path on this machine.

    Optimizer states of shards are read only if ``states``, their file without tensors only if
    ``extra``.
    """
    kind = kind_of(path)
    if kind == "sharded":
        content = _sharded(path, states=states)
        content |= formats.load(path / SHARDED_EXTRA, weights_only=weights_only) if extra else {}
    elif kind == "deepspeed":
        content = _deepspeed(path)
    else:
        content = formats.load(path, weights_only=weights_only, mmap=not states)
        if not isinstance(content.get("state_dict"), dict):
            given = f"{str(path)!r}, a file without 'state_dict'"
            raise CheckpointFormatError(given, "give a checkpoint that Lightning's Trainer wrote", formats.ALLOWED)
    if said := file_format.newer(content.get(file_format.NOTES)):
        raise CheckpointFormatError(f"{str(path)!r} {said}", file_format.UPDATE)
    return {**content, "state_dict": plain_names(content["state_dict"])}


def read_weights(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the ``state_dict`` that :func:`read_full` returns. Objects in the file are unpickled.

    A folder of shards is read without its optimizer states.

    Raises:
        CheckpointFormatError: the checkpoint cannot be read.
        FileNotFoundError: nothing is at a remote address.
        MissingExtraError: the checkpoint is DeepSpeed's, and DeepSpeed is not installed.
    """
    with formats.local(path) as place:
        return _read(place, False, states=False, extra=False)["state_dict"]


def read_optimizer_states(path: str | PathLike[str]) -> list[dict[str, Any]]:
    """Return the optimizer states of a folder of shards as :func:`read_full` returns them.

    Raises:
        CheckpointFormatError: the index is damaged, or a file of shards is missing.
        FileNotFoundError: there is no index.
    """
    with formats.local(path) as place:
        return _sharded_states(_read_shards(place, set(_optimizer_keys(_roots(_metadata(place))))))


# the keys under which ModelParallelStrategy and FSDPStrategy save the weights
_WEIGHTS = ("state_dict", "model")


@dataclass(frozen=True)
class ShardIndex:
    """The names in a folder of FSDP2's shards."""

    #: the dotted names of all entries, weights and optimizer states
    entries: frozenset[str]
    #: the names of the weights; empty for a folder of FSDP1's, because its key for them differs
    weights: tuple[str, ...]
    #: the number of optimizers
    optimizers: int


def index_of(path: str) -> ShardIndex:
    """Return the names in the index of a folder of shards. No tensor is read.

    ``path`` may have any protocol of fsspec's.

    Raises:
        CheckpointFormatError: the index of a folder on this machine is damaged, or a file is
            missing.
        FileNotFoundError: there is no index.
    """
    index = shard_storage(path).read_metadata() if formats.is_remote_path(path) else _metadata(Path(path))
    planned: Mapping[str, Any] = index.planner_data or {}
    weights = [str(place[1]) for place in planned.values() if place[0] == _WEIGHTS[0] and len(place) > 1]
    return ShardIndex(
        entries=frozenset(index.state_dict_metadata),
        weights=tuple(dict.fromkeys(map(plain_name, weights))),
        optimizers=len(_optimizer_keys(_roots(index))),
    )


def _roots(metadata: Any) -> list[str]:
    return list(dict.fromkeys(str(place[0]) for place in (metadata.planner_data or {}).values()))


def _optimizer_keys(roots: Iterable[str]) -> list[str]:
    """Return the keys of the optimizers in the order of their numbers."""
    numbers = sorted(int(name.removeprefix(OPTIMIZER)) for name in roots if name.startswith(OPTIMIZER))
    return [f"{OPTIMIZER}{number}" for number in numbers]


def _sharded(path: Path, *, states: bool) -> dict[str, Any]:
    """Return the weights of a folder of shards, and its optimizer states if ``states``, else none.

    Raises:
        CheckpointFormatError: the folder is damaged, or has no weights.
    """
    roots = _roots(_metadata(path))
    key = next((key for key in _WEIGHTS if key in roots), None)
    if key is None:
        raise formats.damaged(path, f"its shards hold {', '.join(roots) or 'nothing'}, and no weights")
    content = _read_shards(path, None if states else {key})
    return {"state_dict": content[key], "optimizer_states": _sharded_states(content)}


def _read_shards(path: Path, keys: set[str] | None) -> dict[str, Any]:
    """Return the entries of a folder of shards below ``keys``, or all for ``None``.

    Raises:
        CheckpointFormatError: an entry cannot be read.
    """
    try:
        return read_shards(path, keys)
    except CheckpointException as error:  # it has an error for each rank, here for one
        raise formats.damaged(path, next(iter(error.failures.values()))[0]) from error


def _sharded_states(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [rekeyed(content[key]) for key in _optimizer_keys(content)]


def _metadata(path: Path) -> Any:
    """Return the index of a folder of shards.

    Raises:
        CheckpointFormatError: the index is damaged, or a file that it names is missing.
        FileNotFoundError: there is no index.
    """
    try:
        metadata = FileSystemReader(path).read_metadata()
    except (pickle.UnpicklingError, EOFError, AttributeError) as error:
        raise formats.damaged(path, error) from error
    stored: dict[Any, Any] = metadata.storage_data or {}
    missing = sorted({str(info.relative_path) for info in stored.values() if not (path / info.relative_path).is_file()})
    if missing:
        raise formats.damaged(path, f"it lacks {', '.join(missing)}: copy the shards of all nodes into it")
    return metadata


# ------------------------------------------------------------------ DeepSpeed: fp32 weights from the masters

LEFT_OUT = (
    "DeepSpeed stores optimizer state as one flat partition per rank, which only the same number of ranks at the same "
    "ZeRO stage can load (1 and 2 count as one); here optimizer state starts from scratch."
)

# the keys that DeepSpeedEngine adds to Lightning's
_OWN = frozenset({
    "module", "optimizer", "buffer_names", "param_shapes", "shared_params", "frozen_param_shapes",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "universal_checkpoint_info", "ds_config", "ds_version",
})  # fmt: skip


def resumable(path: Path, stage: int, processes: int) -> bool:
    """True if DeepSpeed can resume from a folder in ``stage`` with ``processes`` ranks.

    The folder needs one partition of optimizer state for each rank. Stages 1 and 2 read each
    other's folders, stage 3 only its own.

    Raises:
        CheckpointFormatError: the folder has no model states.
    """
    folder = deepspeed_folder(path)
    whole = (folder / "mp_rank_00_model_states.pt").is_file()
    return whole == (stage < 3) and len(list(folder.glob("*_optim_states.pt"))) == processes


def loads_alike(path: Path, groups: list[list[str]]) -> bool:
    """True if the param groups in a folder of DeepSpeed's equal ``groups``, names in order.

    Raises:
        CheckpointFormatError: the model states of rank 0 are missing or damaged.
    """
    states = _model_states(path, deepspeed_folder(path))
    return [[plain_name(name) for name in group] for group in states.get("param_shapes") or ()] == groups


def read_model_states(file: Path) -> tuple[dict[str, Any], list[str]]:
    """Return Lightning's keys in a file of DeepSpeed's model states, and the names of all weights.

    Tensors are copies, so the file may be removed afterwards.

    Raises:
        CheckpointFormatError: the file is damaged.
    """
    states = _checked_model_states(file)
    content = {key: value for key, value in states.items() if key not in _OWN}
    # copied: the file is mapped into memory, and may be removed
    return map_tensors(content, torch.Tensor.clone), list(plain_names(states["module"]))


def _deepspeed(path: Path) -> dict[str, Any]:
    """Return the content that :func:`read_full` returns for a DeepSpeed checkpoint."""
    try:
        with quietly():  # its import logs the device at length
            from deepspeed.utils import zero_to_fp32
    except ImportError:
        raise MissingExtraError("deepspeed", "deepspeed", "reading a DeepSpeed checkpoint") from None
    folder = deepspeed_folder(path)
    states = _model_states(path, folder)
    state_dict: dict[str, Any] = states["module"]
    groups: list[Mapping[str, Any]] = [*(states.get("param_shapes") or ()), states.get("frozen_param_shapes") or {}]
    shapes = {name: tuple(shape) for group in groups for name, shape in group.items()}
    if shapes:  # under stage 0 there are none, because stage 0 is DDP
        try:
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):  # it prints, and draws progress bars
                masters: Any = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(path), tag=folder.name)
        except (ValueError, OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise formats.damaged(path, error) from error
        state_dict = _full(path, states, shapes, masters)
    record: Mapping[str, Any] = states.get(file_format.NOTES) or {}
    return {
        **{key: value for key, value in states.items() if key not in _OWN},
        "state_dict": _as_recorded(plain_names(state_dict), record.get("dtypes", {})),
        "optimizer_states": [],
        "optimizer_left_out": LEFT_OUT,
    }


def _model_states(path: Path, folder: Path) -> dict[str, Any]:
    """Return DeepSpeed's model states of rank 0 in ``folder``. ``path`` is for messages.

    Raises:
        CheckpointFormatError: the file is missing or damaged.
    """
    names = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise formats.damaged(path, "it lacks the model states of rank 0: copy the files of all nodes into it")
    return _checked_model_states(file)


def _checked_model_states(file: Path) -> dict[str, Any]:
    states = formats.load(file, weights_only=False, mmap=True)
    if not isinstance(states.get("module"), dict):
        raise formats.damaged(file.parent.parent, f"{file.name} holds no module")
    return states


def _full(
    path: Path, states: Mapping[str, Any], shapes: dict[str, tuple[int, ...]], masters: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return the engine's state dict with its weights replaced by those in ``masters``.

    ``masters`` has the fp32 masters of trained weights, and whole frozen weights. Buffers stay as
    they are. The shapes of tied weights are added to ``shapes``.

    Raises:
        CheckpointFormatError: a weight does not have its recorded shape.
    """
    shared: Mapping[str, str] = states.get("shared_params") or {}
    shapes |= {name: shapes[other] for name, other in shared.items() if other in shapes}
    # detach: DeepSpeed saved the masters with requires_grad, and their slices inherit it.
    full: dict[str, Any] = {
        name: masters[name].detach() if name in shapes and name in masters else value
        for name, value in states["module"].items()
    }
    # Stage 3 saves empty entries for its weights. Each must be replaced by now.
    wrong = [name for name, shape in shapes.items() if name in full and tuple(full[name].shape) != shape]
    if wrong:
        raise formats.damaged(path, f"its parts do not make up {wrong[0]!r}")
    return full


def _as_recorded(state_dict: dict[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """Return the state dict with floating tensors in the dtype recorded for their name.

    Names without a recorded dtype keep theirs. Tied tensors stay tied.
    """
    wanted = {plain_name(name): TORCH_DTYPES[dtype] for name, dtype in dtypes.items()}
    weights = {name: value for name, value in state_dict.items() if name in wanted and isinstance(value, Tensor)}
    return state_dict | _plain(weights, wanted, tied=True)
