"""What may be written in a plan: pure data and its rules, without torch, so that a config can be checked anywhere."""

from lightning_mp.policy.pieces import FP8, STORAGE_DTYPES, Checkpointing, LossScaling, NonFinite, Pin, storage_dtype
from lightning_mp.policy.precision_policy import (
    TF32_SETTINGS,
    CheckpointingLike,
    FP8Like,
    LossScalingLike,
    NonFiniteLike,
    PinsLike,
    PrecisionPolicy,
)
from lightning_mp.policy.words import DTYPES, PRECISIONS, Precision, precision_word

__all__ = [
    "DTYPES",
    "FP8",
    "PRECISIONS",
    "STORAGE_DTYPES",
    "TF32_SETTINGS",
    "Checkpointing",
    "CheckpointingLike",
    "FP8Like",
    "LossScaling",
    "LossScalingLike",
    "NonFinite",
    "NonFiniteLike",
    "Pin",
    "PinsLike",
    "Precision",
    "PrecisionPolicy",
    "precision_word",
    "storage_dtype",
]
