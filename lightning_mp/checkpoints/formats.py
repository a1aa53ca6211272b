"""Functions for the three checkpoint formats: detection, local copies, reading and entry names."""

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

#: Lightning's file beside the shards of torch.distributed.checkpoint, and that package's own index
SHARDED_EXTRA, SHARDED_INDEX = "meta.pt", ".metadata"
#: the prefix of an optimizer's number, in the shards
OPTIMIZER = "optimizer_"
#: the file that names DeepSpeed's folder, and the name Lightning gives that folder
DEEPSPEED_LATEST, DEEPSPEED_TAG = "latest", "checkpoint"
DEEPSPEED_MODEL = "*_model_states.pt"

ALLOWED = (
    f"a .ckpt file of Lightning, a folder of shards with {SHARDED_INDEX} and {SHARDED_EXTRA}, "
    f"or a folder of DeepSpeed's with {DEEPSPEED_LATEST!r}"
)


class CheckpointFormatError(ValueError):
    """The error for a checkpoint that cannot be read, or whose output cannot be written."""

    def __init__(self, problem: str, fix: str, allowed: str = "") -> None:
        self.fault = Fault(problem, fix=fix, allowed=allowed)
        super().__init__(str(self.fault))

    def __reduce__(self) -> tuple[type[CheckpointFormatError], tuple[str, str, str]]:
        return type(self), (self.fault.problem, self.fault.fix, self.fault.allowed)


def without_file_protocol(path: Any) -> Any:
    """Return ``path`` without ``file://`` or ``local://``. Other paths are returned unchanged."""
    protocol, plain = split_protocol(path)
    return plain if protocol in ("file", "local") else path


def is_remote_path(path: Any) -> bool:
    """True if only fsspec reaches ``path`` (``s3://``, ``memory://``), not the operating system."""
    return split_protocol(without_file_protocol(path))[0] is not None


def kind_of(path: str | os.PathLike[str]) -> Kind:
    """Return the format of the checkpoint at ``path``, from the names of its files.

    Any file counts as ``"file"``, because its content is not read.

    Raises:
        CheckpointFormatError: nothing is at ``path``, or a folder that is no complete checkpoint.
    """
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
    """True if a file or a folder is at ``path``, which may have any protocol of fsspec's."""
    files, place = _on(path)
    return bool(files.exists(place))


def _on(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the fsspec file system of ``path``, and its name for the path."""
    files, place = cast("tuple[Any, str]", url_to_fs(os.fspath(path)))
    return files, place


@contextmanager
def local(path: str | os.PathLike[str], *, writes: bool = False) -> Generator[Path, None, None]:
    """Yield a path on this machine that stands for ``path``.

    A path on this machine is yielded itself. For a remote path, the yielded one is in a temporary
    folder, and that folder is deleted at the end. Without ``writes``, the remote contents are
    copied there first. With ``writes``, the file there is uploaded at the end, unless the block
    raises.

    Raises:
        FileNotFoundError: nothing is at a remote path that is to be read.
    """
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
    """Write a file behind any protocol of fsspec's. Its folder is made if it does not exist."""
    files, place = _on(path)
    files.makedirs(place.rpartition("/")[0], exist_ok=True)
    files.pipe_file(place, content)


def remove_index(path: str) -> None:
    """Delete the index of a folder of shards, if there is one. The folder is then no checkpoint."""
    files, place = _on(path)
    if files.exists(f"{place}/{SHARDED_INDEX}"):
        files.rm_file(f"{place}/{SHARDED_INDEX}")


def deepspeed_folder(place: Path) -> Path:
    """Return the folder of files inside a DeepSpeed checkpoint.

    Raises:
        CheckpointFormatError: that folder has no model states.
    """
    latest = place / DEEPSPEED_LATEST
    tag = latest.read_text(encoding="utf-8").strip() if latest.is_file() else DEEPSPEED_TAG
    if any((place / tag).glob(DEEPSPEED_MODEL)):
        return place / tag
    raise damaged(place, f"its folder {tag!r} has no file {DEEPSPEED_MODEL}")


def load(path: Path | str, *, weights_only: bool | None, mmap: bool = False) -> dict[str, Any]:
    """Return the dict that ``torch.save`` wrote to ``path``, with its tensors on the CPU.

    With ``mmap`` a tensor is read from the file when it is used.

    Raises:
        CheckpointFormatError: the file is not a complete one of ``torch.save``, or has no dict. Or
            it has objects besides tensors and plain values, which only ``weights_only=False``
            permits.
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
    """Return the error for a checkpoint that could not be read because of ``error``."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return CheckpointFormatError(f"{str(path)!r} cannot be read: {reason}", "copy it again, or take an earlier one")


# ------------------------------------------------------------------ names, and keys of optimizer state
# Formats key optimizer state differently, but parameters have the same order in the groups of all.


def plain_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` under names without wrappers (``_orig_mod.`` and the like), in its order."""
    return {plain_name(name): value for name, value in state.items()}


def rekeyed(state: Mapping[str, Any], keys: Iterable[Any] | None = None) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` with new keys for its parameters.

    ``keys`` are in the order of the groups.
    ``None`` for ``keys`` is 0, 1, 2, …. The result has only ``state`` and ``param_groups``.

    Raises:
        ValueError: ``keys`` has another length than the groups together.
    """
    old = [_plain(key) for group in state["param_groups"] for key in group["params"]]
    new = dict(zip(old, range(len(old)) if keys is None else keys, strict=True))
    return {
        # the key is absent if the optimizer has no state
        "state": {new[_plain(key)]: values for key, values in state.get("state", {}).items()},
        "param_groups": [
            {**group, "params": [new[_plain(key)] for key in group["params"]]} for group in state["param_groups"]
        ],
    }


def by_parameter(
    state: Mapping[str, Any], optimizer: Optimizer, value: Callable[[Tensor | None, Any], Any]
) -> dict[str, Any]:
    """Return ``state`` with each entry of ``"state"`` replaced by ``value(parameter, entry)``.

    An entry is dropped if its value is ``None``. ``state`` itself is unchanged. ``parameter`` is
    ``None`` if the optimizer has fewer parameters than ``state``. Nothing is raised then, because
    ``optimizer.load_state_dict`` refuses such a state.
    """
    keys = [key for group in state["param_groups"] for key in group["params"]]
    own = dict(zip(keys, parameters_of(optimizer), strict=False))
    entries = {key: value(own.get(key), entry) for key, entry in state["state"].items()}
    return {**state, "state": {key: entry for key, entry in entries.items() if entry is not None}}


def _plain(key: Any) -> Any:
    return plain_name(key) if isinstance(key, str) else key
