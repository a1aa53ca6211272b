"""Few cells of a product, in which every two of its values meet; the others are for ``make test-whole``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Cell = TypeVar("Cell", bound=tuple[Any, ...])
WHOLE = [pytest.mark.slow, pytest.mark.whole]


def pairwise(cells: Iterable[Cell]) -> list[Cell]:
    """Few that have every two values together that any has."""
    left = {cell: set(combinations(enumerate(cell), 2)) for cell in cells}
    chosen, missing = list[Cell](), set().union(*left.values())
    while missing:
        chosen.append(max(left, key=lambda cell: len(left[cell] & missing)))
        missing -= left[chosen[-1]]
    return chosen


def sampled(*axes: Iterable[Any]) -> list[Any]:
    """Every cell of the product as a parameter, those of :func:`pairwise` to be run each time."""
    cells = list(product(*axes))
    often = set(pairwise(cells))
    return [pytest.param(*cell, marks=[] if cell in often else WHOLE) for cell in cells]
