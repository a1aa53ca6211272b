"""Callbacks for existing projects on Lightning's own precision plugins and strategies; each works alone."""

from lightning_mp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_mp.callbacks.dtype_pinning import DtypePinning
from lightning_mp.callbacks.enable_tf32 import EnableTF32

__all__ = ["ActivationCheckpointing", "DtypePinning", "EnableTF32"]
