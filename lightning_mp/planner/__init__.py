"""Will it fit, how fast, split how: arithmetic that is held against published runs. No torch.

``predict_memory`` runs a Trainer: it is made several floors above, and fetched from there on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_mp.planner.advise import Advice, advise
from lightning_mp.planner.estimate import Estimate, Range, estimate
from lightning_mp.planner.memory import MemoryPrediction
from lightning_mp.planner.shape import CONVENTIONS, Layout, ModelShape, flops_per_token

__all__ = [
    "CONVENTIONS",
    "Advice",
    "Estimate",
    "Layout",
    "MemoryPrediction",
    "ModelShape",
    "Range",
    "advise",
    "estimate",
    "flops_per_token",
    "predict_memory",
]

if TYPE_CHECKING:
    predict_memory: Any


def __getattr__(name: str) -> Any:
    if name != "predict_memory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module("lightning_mp.tracing.predict").predict_memory
