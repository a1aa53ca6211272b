"""Folders are written beside their place, and put there once they are whole."""

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
    """Where a folder is written until it is whole: written over in place, it could hold parts of two steps.

    A bucket renames nothing: there it is written in place, once it is without an index, which comes last.
    """
    return target if is_remote_path(target) else str(_beside(Path(target), "unfinished"))


def begin(target: str) -> None:
    """Delete what a process that was killed left beside ``target``, or in a bucket the index of what is there."""
    if is_remote_path(target):
        formats.remove_index(target)
        return
    recover(target)
    for word in ("unfinished", "whole", "old"):
        _delete(_beside(Path(target), word))


def recover(target: str) -> None:
    """Finish what a process that was killed began: if nothing is at ``target``, a whole folder beside it goes there.

    Nothing is deleted: another process may be writing.
    """
    path = Path(target)
    if is_remote_path(target) or _is_there(path):
        return
    for word in ("whole", "old"):  # the newer one first
        beside = _beside(path, word)
        if beside.is_dir() and _rename(beside, path):
            return


def finish(target: str) -> None:
    """Put what is whole by now in the place of ``target``; each node calls it, as each may have a disk of its own.

    The two swap names in one call if the file system can: a process that is killed always leaves a checkpoint at
    ``target``. Else there is none between two calls, and ``recover`` puts it there.
    """
    if is_remote_path(target):
        return
    path = Path(target)
    whole, old = _beside(path, "whole"), _beside(path, "old")
    if not _rename(Path(unfinished(target)), whole):  # on a shared disk another node was first
        return
    if not (_is_there(path) and exchange(path, whole)):
        if _is_there(path):
            _rename(path, old)
        _rename(whole, path)
    if _is_there(path):
        _delete(whole)
        _delete(old)


def exchange(one: Path, other: Path) -> bool:
    """Have two paths swap names in one call. Return False if the system or the file system has none."""
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
    """A name that nobody takes for a checkpoint's: ModelCheckpoint looks for ``last`` in names."""
    return path.with_name(f".{word}-{crc32(path.name.encode()):08x}")
