"""Checkpoints of every strategy, told apart, read whole, and written as one plain state dict."""

from __future__ import annotations

from lightning_mp.checkpoints.consolidate_file import consolidate, read_full
from lightning_mp.checkpoints.formats import CheckpointFormatError, Kind, kind_of

__all__ = ["CheckpointFormatError", "Kind", "consolidate", "kind_of", "read_full"]
