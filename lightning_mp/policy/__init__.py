"""The fields of a plan: pure data and its rules. It imports no torch, so a config can be checked anywhere."""

from lightning_mp.policy.pieces import FP8, STORAGE_DTYPES, Checkpointing, LossScaling, NonFinite, Pin
from lightning_mp.policy.precision_policy import PRECISIONS, PrecisionPolicy, precision_word

__all__ = [
    "FP8",
    "PRECISIONS",
    "STORAGE_DTYPES",
    "Checkpointing",
    "LossScaling",
    "NonFinite",
    "Pin",
    "PrecisionPolicy",
    "precision_word",
]
