"""Callbacks for existing projects on Lightning's own precision plugins and strategies; each works alone."""

from lightning_mp.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_mp.callbacks.dtype_pinning import DtypePinning
from lightning_mp.callbacks.enable_tf32 import EnableTF32
from lightning_mp.callbacks.loss_scale_monitor import LossScaleMonitor
from lightning_mp.callbacks.nonfinite_guard import NonFiniteGuard
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.callbacks.training_health import TrainingHealth
from lightning_mp.monitor.actions import ReduceLR
from lightning_mp.monitor.nonfinite.saved_batch import replay_saved

__all__ = [
    "ActivationCheckpointing",
    "DtypePinning",
    "EnableTF32",
    "LossScaleMonitor",
    "NonFiniteGuard",
    "PrecisionAudit",
    "ReduceLR",
    "TrainingHealth",
    "replay_saved",
]
