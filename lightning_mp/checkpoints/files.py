"""``torch.load`` with errors that say what the file is and what to do."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from lightning_mp.checkpoints.formats import ALLOWED, CheckpointFormatError

#: the formats weights are kept in
STORAGE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load(path: Path, *, weights_only: bool | None, mmap: bool = False) -> dict[str, Any]:
    """What ``torch.save`` wrote to ``path``, on the CPU; with ``mmap`` tensors are read when they are used.

    Raises:
        CheckpointFormatError: it is no whole file of ``torch.save``, holds no dict, or holds more than tensors and
            plain values where ``weights_only`` (torch's default) forbids it.
    """
    if not zipfile.is_zipfile(path):
        raise CheckpointFormatError(
            f"{str(path)!r}, which torch.save did not write, or not to its end",
            ALLOWED,
            "give the checkpoint itself; if it was cut short, copy it again or take an earlier one",
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _refused(path, weights_only) from error
    except (RuntimeError, EOFError) as error:
        raise damaged(path, error) from error
    if not isinstance(content, dict):
        raise CheckpointFormatError(
            f"{str(path)!r}, which holds a {type(content).__name__}", "a dict", "check the path"
        )
    return content


def damaged(path: Path, error: BaseException) -> CheckpointFormatError:
    """The error for a checkpoint whose reading ended in ``error``."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return CheckpointFormatError(
        f"{str(path)!r}, which cannot be read: {reason}",
        "a whole checkpoint",
        "copy it again, or take an earlier one",
    )


def _refused(path: Path, weights_only: bool | None) -> CheckpointFormatError:
    if weights_only is False:
        return CheckpointFormatError(
            f"{str(path)!r}, which is no pickle of torch.save", ALLOWED, "give the checkpoint itself"
        )
    return CheckpointFormatError(
        f"{str(path)!r}, which holds objects besides tensors and plain values (hyperparameters, often)",
        "plain checkpoints, unless weights_only=False",
        "if you trust where it comes from, pass weights_only=False (--trust on the command line)",
    )
