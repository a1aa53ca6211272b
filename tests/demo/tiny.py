"""A model and a text small enough for a test of a second."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lightning_mp.demo.records import Job
from lightning_mp.demo.shapes import Shape
from lightning_mp.demo.tokens import Corpus

SHAPE = Shape(layers=2, width=32, heads=2, context=16, vocab=64, rows=64, batch=2, steps=4, val_batches=2, lr=1e-2)


def corpus() -> Corpus:
    """A repeating pattern with some noise: learnable, and the same every time."""
    tokens = (np.arange(2000) * 7 % 50 + np.random.default_rng(0).integers(0, 3, 2000)).astype(np.uint16)
    return Corpus(tokens[:-200], tokens[-200:], "digest", cached=False)


def job(mode: str, folder: Path, steps: int = 4, shape: Shape = SHAPE) -> Job:
    """A job on the CPU."""
    return Job(mode=mode, shape=shape, steps=steps, seed=7, device="cpu", folder=folder)
