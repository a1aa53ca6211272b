"""Will it fit, how fast, split how: formulas held against published runs, without torch, and two traced steps."""

from typing import TYPE_CHECKING, Any

from lightning_mp.planner.advise import Advice, advise
from lightning_mp.planner.estimate import Estimate, estimate
from lightning_mp.planner.memory import MemoryPrediction
from lightning_mp.planner.shape import ModelShape, flops_per_token

__all__ = [
    "Advice",
    "Estimate",
    "MemoryPrediction",
    "ModelShape",
    "advise",
    "estimate",
    "flops_per_token",
    "predict_memory",
]

if TYPE_CHECKING:
    from lightning_mp.planner.predict import predict_memory


def __getattr__(name: str) -> Any:
    if name != "predict_memory":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_mp.planner.predict import predict_memory  # here: the rest needs no torch

    return predict_memory
