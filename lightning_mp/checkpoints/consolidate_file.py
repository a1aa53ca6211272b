"""A checkpoint of any of the formats as one plain dict, and as one plain state dict for all that knows no training."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_mp.checkpoints import formats
from lightning_mp.checkpoints.folders import deepspeed_checkpoint, sharded_checkpoint, sharded_weights
from lightning_mp.checkpoints.formats import ALLOWED, STORAGE, CheckpointFormatError, kind_of, plain_names
from lightning_mp.errors import Faults, MissingExtraError
from lightning_mp.policy.pieces import storage_dtype

_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


def consolidate(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    dtype: object = None,
    *,
    prefix: str = "",
    cast_all: bool = False,
    weights_only: bool | None = None,
) -> Path | str:
    """Write the weights of ``checkpoint`` to ``output`` as one plain state dict, name → tensor and nothing else.

    Args:
        checkpoint: a ``.ckpt`` file of Lightning, a folder of shards, or a folder of DeepSpeed's; a path, or an address
            that fsspec reads (``s3://...``), which is copied to a temporary folder first.
        output: ``.pt``, ``.pth``, ``.bin`` or ``.ckpt`` for ``torch.save``, or ``.safetensors``; a path or an address.
            What is there is replaced once the new file is complete.
        dtype: ``"fp32"``, ``"bf16"``, ``"fp16"`` or another spelling of one, for floating tensors; by default each
            keeps its own (fp32 masters from DeepSpeed, unless the checkpoint records what the run declared). What the
            plan of the run pinned to fp32 stays fp32, as does what the model declares so for that dtype.
        prefix: write only the names under it, without it: ``"model."`` gives what ``transformers`` loads when the
            LightningModule calls its model ``self.model``.
        cast_all: cast these, too.
        weights_only: as for ``torch.load``; ``False`` unpickles objects, from a checkpoint you trust.

    Returns:
        The path of what was written, or its address.

    Raises:
        CheckpointFormatError: the checkpoint cannot be read, or ``output`` or ``prefix`` does not fit.
        PlanError: ``dtype`` is none to store weights in.
        MissingExtraError: safetensors or DeepSpeed is needed and not installed.
    """
    _, left_out = write_consolidated(checkpoint, output, dtype, prefix, cast_all, weights_only)
    if left_out:
        warnings.warn(f"{output}: no tensors, so left out: {', '.join(left_out)}", stacklevel=2)
    return str(output) if formats.is_remote_path(output) else Path(output)


def write_consolidated(
    checkpoint: str | os.PathLike[str],
    output: str | os.PathLike[str],
    dtype: object,
    prefix: str,
    cast_all: bool,
    weights_only: bool | None,
) -> tuple[dict[str, Tensor], list[str]]:
    """As :func:`consolidate`; what was written, and the names of what is no tensor."""
    wanted = None
    if dtype is not None:
        with Faults("dtype") as faults:
            wanted = storage_dtype(dtype, "dtype", faults)
    with formats.local_copy(checkpoint) as source, formats.local_output(output) as target:
        save = _writer(target)
        if target.is_dir() or (target.exists() and source.exists() and target.samefile(source)):
            given = f"the output {str(target)!r} is a folder or the checkpoint itself"
            raise CheckpointFormatError(given, "choose another name")
        read, others = _read(source, weights_only)
        fp32 = _fp32_names(others(), wanted) if wanted in ("bf16", "fp16") and not cast_all else ()
        dtypes = {name: STORAGE["fp32" if name in fp32 else wanted] for name in read if wanted}
        weights, dtypes = _under(read, prefix, source), _under(dtypes, prefix, source) if dtypes else {}
        tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
        if not tensors:
            raise CheckpointFormatError(f"{str(source)!r} has no tensor in it", "check the path")
        plain = _plain(tensors, dtypes, tied=target.suffix != ".safetensors")
        _write_whole(plain, target, save)
    return plain, [name for name in weights if name not in tensors]


def _writer(output: Path) -> Callable[[dict[str, Tensor], Path], Any]:
    if output.suffix not in _SUFFIXES:
        raise CheckpointFormatError(f"the output {str(output)!r}", "add an ending", ", ".join(_SUFFIXES))
    if output.suffix != ".safetensors":
        return torch.save
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise MissingExtraError("safetensors", "hf", "writing .safetensors") from None

    # "pt" is what transformers looks for before it loads the file.
    return partial(save_file, metadata={"format": "pt"})


def _fp32_names(checkpoint: Mapping[str, Any], half: str) -> set[str]:
    """What the plan, whatever its class is called, recorded as fp32 in a file of ``half``."""
    states = [state for state in checkpoint.values() if isinstance(state, dict) and {"policy", "fp32"} <= state.keys()]
    return {name for state in states for name in state["fp32"].get(half, ())}


def _under(weights: Mapping[str, Any], prefix: str, source: Path) -> dict[str, Any]:
    """What is below ``prefix``, whole parts of names only, without it."""
    if not prefix:
        return dict(weights)
    start = prefix.rstrip(".") + "."
    found = {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
    if not found:
        known = ", ".join(dict.fromkeys(name.partition(".")[0] + "." for name in weights if "." in name))
        raise CheckpointFormatError(f"the prefix {prefix!r} of {str(source)!r}", "write another", known or "none")
    return found


def _plain(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], *, tied: bool) -> dict[str, Tensor]:
    """Each tensor contiguous, floating ones as ``dtypes`` say, in storage of its own where ties may not stay."""
    made: dict[tuple[Any, ...], Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr(), tensor.storage_offset()
        key = (*place, tensor.shape, tensor.stride(), tensor.dtype)
        again = made.get(key)
        if again is None:
            cast = dtypes.get(name, tensor.dtype) if tensor.is_floating_point() else tensor.dtype
            own = tensor.detach().to(cast).contiguous()
            # torch.save would write the whole of what a view is a part of.
            made[key] = own if own.untyped_storage().nbytes() == own.nbytes else own.clone()
        plain[name] = made[key] if tied or again is None else again.clone()
    return plain


def _write_whole(tensors: dict[str, Tensor], output: Path, save: Callable[[dict[str, Tensor], Path], Any]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    half = output.with_name(f".{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        half.touch()
        mode = half.stat().st_mode
        save(tensors, half)
        half.chmod(mode)  # safetensors makes files that only their owner may read
        half.replace(output)
    finally:
        half.unlink(missing_ok=True)


# ------------------------------------------------------------------ reading, in this process alone


def read_full(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
    """The checkpoint at ``path`` in the form of Lightning's single file, with whole tensors on the CPU.

    ``state_dict`` is complete, under the names of the LightningModule without wrappers (``_orig_mod.`` and the like).
    ``optimizer_states`` are what plain ``Optimizer.load_state_dict`` takes; of a DeepSpeed checkpoint there are none,
    and ``optimizer_left_out`` says why. All other keys are as they were saved. No process group is needed; inside one,
    every rank reads for itself.

    ``weights_only`` is ``torch.load``'s, for the single file and for the part of a sharded checkpoint that holds no
    tensors. The index of a sharded checkpoint and all files of DeepSpeed are pickles whatever it says: read only those
    you trust.

    Raises:
        CheckpointFormatError: no checkpoint, an incomplete one, or one that ``weights_only`` forbids.
        MissingExtraError: a DeepSpeed checkpoint where DeepSpeed is not installed.
    """
    with formats.local_copy(path) as place:
        kind = kind_of(place)
        if kind == "sharded":
            return sharded_checkpoint(place, weights_only)
        if kind == "deepspeed":
            return deepspeed_checkpoint(place)
        content = _file(place, weights_only, mmap=False)
    return {**content, "state_dict": plain_names(content["state_dict"])}


def _read(path: Path, weights_only: bool | None) -> tuple[dict[str, Any], Callable[[], Mapping[str, Any]]]:
    """The ``state_dict`` of :func:`read_full`, and what reads the rest, but optimizer states where they are apart."""
    kind = kind_of(path)
    if kind == "sharded":
        return sharded_weights(path), partial(formats.load, path / formats.SHARDED_EXTRA, weights_only=weights_only)
    content = _file(path, weights_only, mmap=True) if kind == "file" else deepspeed_checkpoint(path)
    return plain_names(content["state_dict"]), lambda: content


def _file(path: Path, weights_only: bool | None, *, mmap: bool) -> dict[str, Any]:
    content = formats.load(path, weights_only=weights_only, mmap=mmap)
    if isinstance(content.get("state_dict"), dict):
        return content
    given = f"{str(path)!r}, a file without 'state_dict'"
    raise CheckpointFormatError(given, "give a checkpoint that Lightning's Trainer wrote", ALLOWED)
