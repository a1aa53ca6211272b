"""A checkpoint of any of the formats as one plain dict, read in this process alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning_mp.checkpoints import formats, sharded, zero
from lightning_mp.checkpoints.formats import ALLOWED, CheckpointFormatError, kind_of, plain_names


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
    place = Path(path)
    kind = kind_of(place)
    if kind == "sharded":
        return sharded.checkpoint(place, weights_only)
    if kind == "deepspeed":
        return zero.checkpoint(place)
    content = _file(place, weights_only, mmap=False)
    return {**content, "state_dict": plain_names(content["state_dict"])}


def read_weights(path: str | os.PathLike[str], *, weights_only: bool | None = None) -> dict[str, Any]:
    """The ``state_dict`` of :func:`read_full`, without reading optimizer states where the format allows that."""
    place = Path(path)
    kind = kind_of(place)
    if kind == "sharded":
        return sharded.weights(place)
    if kind == "deepspeed":
        return zero.weights(place)
    return plain_names(_file(place, weights_only, mmap=True)["state_dict"])


def _file(path: Path, weights_only: bool | None, *, mmap: bool) -> dict[str, Any]:
    content = formats.load(path, weights_only=weights_only, mmap=mmap)
    if isinstance(content.get("state_dict"), dict):
        return content
    raise CheckpointFormatError(
        f"{str(path)!r}, a file without 'state_dict'", ALLOWED, "give a checkpoint that Lightning's Trainer wrote"
    )
