"""Checkpoints of every strategy, told apart, read whole, and written as one plain state dict."""

from lightning_mp.checkpoints.formats import CheckpointFormatError, Kind, kind_of
from lightning_mp.checkpoints.full import consolidate, read_full

__all__ = ["CheckpointFormatError", "Kind", "consolidate", "kind_of", "read_full"]
