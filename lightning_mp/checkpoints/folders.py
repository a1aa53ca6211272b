"""Folders are written beside their place, and put there once they are whole."""

import shutil
from pathlib import Path
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
