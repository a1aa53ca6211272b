"""Few cells of a product, in which every two of its values meet; the others are for ``make test-whole``."""

from collections.abc import Iterable, Mapping
from itertools import combinations, product
from typing import Any, TypeVar

import pytest

Cell = TypeVar("Cell", bound=tuple[Any, ...])
WHOLE = [pytest.mark.slow, pytest.mark.whole]


def covering(pairs: Mapping[Cell, set[Any]]) -> list[Cell]:
    """Few of the cells, whose sets have all that is in any."""
    chosen, missing = list[Cell](), set[Any]().union(*pairs.values())
    while missing:
        chosen.append(max(pairs, key=lambda cell: len(pairs[cell] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen


def pairwise(cells: Iterable[Cell]) -> list[Cell]:
    """Few that have every two values together that any has."""
    return covering({cell: set(combinations(enumerate(cell), 2)) for cell in cells})


def sampled(*axes: Iterable[Any]) -> list[Any]:
    """Every cell of the product as a parameter, those of :func:`pairwise` to be run each time."""
    cells = list(product(*axes))
    often = set(pairwise(cells))
    return [pytest.param(*cell, marks=[] if cell in often else WHOLE) for cell in cells]
