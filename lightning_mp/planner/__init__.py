"""Will it fit, how fast, split how: arithmetic that is held against published runs. No torch."""

from lightning_mp.planner.advise import Advice, Choice, advise
from lightning_mp.planner.estimate import Estimate, estimate
from lightning_mp.planner.layout import Layout
from lightning_mp.planner.shape import CONVENTIONS, ModelShape, flops_per_token
from lightning_mp.planner.speed import Range

__all__ = [
    "CONVENTIONS",
    "Advice",
    "Choice",
    "Estimate",
    "Layout",
    "ModelShape",
    "Range",
    "advise",
    "estimate",
    "flops_per_token",
]
