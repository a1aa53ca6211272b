"""Whether what two runs brought back is the same, to so many digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def same(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-6) -> bool:
    """Whether two nested results are equal: tensors of one dtype and numbers nearly so, anything else exactly."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key], rtol, atol) for key in one)
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(a, b, rtol, atol) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=rtol)
    return bool(one == other)


def of_ranks(ranks: list[dict[str, Any]], key: str) -> list[Any]:
    """What every rank brought back under ``key``; a traceback fails the test."""
    results = [rank[key] for rank in ranks]
    for number, result in enumerate(results):
        assert not (isinstance(result, str) and result.startswith("Traceback")), f"rank {number}:\n{result}"
    return results
