"""Functions that write a folder beside its target, and move it there once it is complete."""

import ctypes
import os
import shutil
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

from lightning_mp.checkpoints import formats
from lightning_mp.checkpoints.formats import is_remote_path


def unfinished(target: str) -> str:
    """Return the path to write a folder to, until ``finish`` moves it to ``target``.

    Files written over an older folder could leave a mix of two steps. A bucket has no rename, so a
    remote path is returned itself. There the index is deleted first and written last.
    """
    return target if is_remote_path(target) else str(_beside(Path(target), "unfinished"))


def begin(target: str) -> None:
    """Delete the folders that a killed process left beside ``target``.

    If ``target`` is missing, ``recover`` puts a complete one of them there first. In a bucket,
    delete the index of the folder at ``target`` instead.
    """
    if is_remote_path(target):
        formats.remove_index(target)
        return
    recover(target)
    for word in ("unfinished", "whole", "old"):
        _delete(_beside(Path(target), word))


def recover(target: str) -> None:
    """Move a complete folder that a killed process left beside ``target`` to ``target``.

    Nothing happens if something is at ``target``, or in a bucket. Nothing is deleted, because
    another process may be writing.
    """
    path = Path(target)
    if is_remote_path(target) or _is_there(path):
        return
    for word in ("whole", "old"):  # the newer one first
        beside = _beside(path, word)
        if beside.is_dir() and _rename(beside, path):
            return


def finish(target: str) -> None:
    """Move the complete folder from ``unfinished(target)`` to ``target``, and delete the older one.

    One rank of each node must call it, because each node may have its own disk. In a bucket nothing
    happens.

    The two folders swap names in one call if the file system can. A killed process then always
    leaves a checkpoint at ``target``. Otherwise, ``target`` is missing between two renames, and
    ``recover`` restores it.
    """
    if is_remote_path(target):
        return
    path = Path(target)
    whole, old = _beside(path, "whole"), _beside(path, "old")
    if not _rename(Path(unfinished(target)), whole):  # another node with the same disk was first
        return
    if not (_is_there(path) and exchange(path, whole)):
        if _is_there(path):
            _rename(path, old)
        _rename(whole, path)
    if _is_there(path):
        _delete(whole)
        _delete(old)


def exchange(one: Path, other: Path) -> bool:
    """Swap the names of two paths in one call. Return False, with no change, if the call fails.

    Only Linux has the call, and not for every file system.
    """
    rename: Any = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def _rename(source: Path, target: Path) -> bool:
    """Rename ``source``. Return False if it is gone: another process has renamed it."""
    try:
        source.rename(target)
    except FileNotFoundError:
        return False
    return True


def _is_there(path: Path) -> bool:
    return os.path.lexists(path)


def _delete(path: Path) -> None:
    """Delete a folder, a file or a link, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _beside(path: Path, word: str) -> Path:
    """Return a path beside ``path`` whose name is no checkpoint's.

    Only a hash of the name is in it, because ModelCheckpoint looks for ``last`` in names.
    """
    return path.with_name(f".{word}-{crc32(path.name.encode()):08x}")
