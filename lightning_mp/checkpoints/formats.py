"""The three formats that strategies write: which one lies at a path, reading a file, and how its entries are called."""

from __future__ import annotations

import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, cast

import torch
from fsspec.core import split_protocol, url_to_fs
from torch import Tensor
from torch.optim import Optimizer

from lightning_mp.errors import Fault
from lightning_mp.modules.patterns import plain_name
from lightning_mp.numerics.grads import parameters_of

Kind = Literal["file", "sharded", "deepspeed"]

#: what Lightning puts beside the shards of torch.distributed.checkpoint, and that package's own index
SHARDED_EXTRA, SHARDED_INDEX = "meta.pt", ".metadata"
#: in front of an optimizer's number, in the shards
OPTIMIZER = "optimizer_"
#: the file that names DeepSpeed's folder, and the name Lightning gives that folder
DEEPSPEED_LATEST, DEEPSPEED_TAG = "latest", "checkpoint"
DEEPSPEED_MODEL = "*_model_states.pt"

ALLOWED = (
    f"a .ckpt file of Lightning, a folder of shards with {SHARDED_INDEX} and {SHARDED_EXTRA}, "
    f"or a folder of DeepSpeed's with {DEEPSPEED_LATEST!r}"
)


class CheckpointFormatError(ValueError):
    """A checkpoint that cannot be read, or an output that cannot be written from it."""

    def __init__(self, problem: str, fix: str, allowed: str = "") -> None:
        self.fault = Fault(problem, fix=fix, allowed=allowed)
        super().__init__(str(self.fault))

    def __reduce__(self) -> tuple[type[CheckpointFormatError], tuple[str, str, str]]:
        return type(self), (self.fault.problem, self.fault.fix, self.fault.allowed)


def without_file_protocol(path: Any) -> Any:
    """``path``, where it is ``file://...`` the path behind that."""
    protocol, plain = split_protocol(path)
    return plain if protocol in ("file", "local") else path


def is_remote_path(path: Any) -> bool:
    """Whether fsspec alone reaches ``path`` (``s3://``, ``memory://``): no folder of the operating system's."""
    return split_protocol(without_file_protocol(path))[0] is not None


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """Which of the formats lies at ``path``, told by the names of the files alone; else a CheckpointFormatError."""
    files, place = _on(path)
    if files.isfile(place):
        return "file"
    if all(files.isfile(f"{place}/{name}") for name in (SHARDED_INDEX, SHARDED_EXTRA)):
        return "sharded"
    if files.isfile(f"{place}/{DEEPSPEED_LATEST}") or files.isdir(f"{place}/{DEEPSPEED_TAG}"):
        if not is_remote_path(path):
            deepspeed_folder(Path(place))
        return "deepspeed"
    what = "is no checkpoint, or not all of one" if files.exists(place) else "does not exist"
    raise CheckpointFormatError(f"{str(path)!r}, which {what}", "give what ModelCheckpoint wrote", ALLOWED)


def exists(path: str | os.PathLike[str]) -> bool:
    """True if a file or a folder lies at ``path``, which any protocol of fsspec may lead to."""
    files, place = _on(path)
    return bool(files.exists(place))


def _on(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """The file system of fsspec's, and what it calls the path."""
    files, place = cast("tuple[Any, str]", url_to_fs(os.fspath(path)))
    return files, place


@contextmanager
def local(path: str | os.PathLike[str], *, writes: bool = False) -> Generator[Path, None, None]:
    """The path itself on this machine; of one elsewhere a copy, for as long as it is read, or until it is written."""
    if not is_remote_path(path):
        yield Path(without_file_protocol(path))
        return
    files, place = _on(path)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / Path(place).name
        if not writes:
            files.get(place, str(copy), recursive=True)
        yield copy
        if writes:
            files.makedirs(place.rpartition("/")[0], exist_ok=True)
            files.put_file(str(copy), place)


def write_bytes(path: str, content: bytes) -> None:
    """Write a file behind any protocol, its folder too."""
    files, place = _on(path)
    files.makedirs(place.rpartition("/")[0], exist_ok=True)
    files.pipe_file(place, content)


def remove_index(path: str) -> None:
    """From now on the folder of shards at ``path`` is no checkpoint."""
    files, place = _on(path)
    if files.exists(f"{place}/{SHARDED_INDEX}"):
        files.rm_file(f"{place}/{SHARDED_INDEX}")


def deepspeed_folder(place: Path) -> Path:
    """The folder inside a DeepSpeed checkpoint that holds its files; a CheckpointFormatError without model states."""
    latest = place / DEEPSPEED_LATEST
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else DEEPSPEED_TAG
    if any((place / tag).glob(DEEPSPEED_MODEL)):
        return place / tag
    raise damaged(place, f"its folder {tag!r} has no file {DEEPSPEED_MODEL}")


def load(path: Path | str, *, weights_only: bool | None, mmap: bool = False) -> dict[str, Any]:
    """What ``torch.save`` wrote to ``path``, on the CPU; with ``mmap`` tensors are read when they are used.

    Raises:
        CheckpointFormatError: it is no whole file of ``torch.save``, holds no dict, or holds more than tensors and
            plain values where ``weights_only`` (torch's default) forbids it.
    """
    files, place = _on(path)
    content: Any = BytesIO(files.cat_file(place)) if is_remote_path(path) else place
    if not zipfile.is_zipfile(content):
        raise damaged(path, "torch.save did not write it, or not to its end")
    if is_remote_path(path):
        content.seek(0)
    try:
        content = torch.load(content, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        if weights_only is False:
            raise damaged(path, error) from error
        raise CheckpointFormatError(
            f"{str(path)!r} holds objects besides tensors and plain values (hyperparameters, often)",
            "if you trust where it comes from, pass weights_only=False (--trust on the command line)",
        ) from error
    except (RuntimeError, EOFError) as error:
        raise damaged(path, error) from error
    if not isinstance(content, dict):
        raise CheckpointFormatError(f"{str(path)!r} holds a {type(content).__name__}, not a dict", "check the path")
    return content


def damaged(path: Path | str, error: BaseException | str) -> CheckpointFormatError:
    """The error for a checkpoint whose reading ended in ``error``."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return CheckpointFormatError(f"{str(path)!r} cannot be read: {reason}", "copy it again, or take an earlier one")


# ------------------------------------------------------------------ names, and ONE numbering of optimizer state
# Each format keys an optimizer's state in its own way; from one to another it goes by the order of its groups alone.


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` under names without wrappers (``_orig_mod.`` and the like), in its order."""
    return {plain_name(name): value for name, value in state.items()}


def rekeyed(state: Mapping[str, Any], keys: Iterable[Any] | None = None) -> dict[str, Any]:
    """An optimizer's ``state_dict`` with its parameters called ``keys``, in the order of its groups; else by place."""
    old = [_plain(key) for group in state["param_groups"] for key in group["params"]]
    new = dict(zip(old, range(len(old)) if keys is None else keys, strict=True))
    return {
        # absent where the optimizer keeps none
        "state": {new[_plain(key)]: values for key, values in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [new[_plain(key)] for key in group["params"]]} for group in state["param_groups"]
        ],
    }


def by_parameter(
    state: Mapping[str, Any], optimizer: Optimizer, value: Callable[[Tensor | None, Any], Any]
) -> dict[str, Any]:
    """``state`` with each entry replaced by ``value(parameter, entry)``; without those of which that is None.

    Groups of other sizes are refused by the optimizer itself: what has no parameter here is given None.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    own = dict(zip(keys, parameters_of(optimizer), strict=False))
    entries = {key: value(own.get(key), entry) for key, entry in state["state"].items()}
    return {**state, "state": {key: entry for key, entry in entries.items() if entry is not None}}


def _plain(key: Any) -> Any:
    return plain_name(key) if isinstance(key, str) else key
