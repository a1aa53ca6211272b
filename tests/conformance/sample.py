"""A part of the matrix for CI: every strategy meets every mode, and each flag both, in cells that a seed chooses."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import combinations

from conformance.policies import POLICIES

Key = tuple[str, str]
Pair = tuple[tuple[str, object], ...]


def pairs(cell: Key) -> set[Pair]:
    """Every two of a cell's strategy, mode, pins and checkpointing."""
    strategy, name = cell
    policy = POLICIES[name]
    values = {
        "strategy": strategy,
        "mode": policy.mode,
        "pins": policy.pins,
        "checkpointing": policy.checkpointing,
    }
    return set(combinations(values.items(), 2))


def choose(strategies: Sequence[str], policies: Iterable[str], seed: str) -> list[Key]:
    """Cells in which every pair occurs that occurs in the whole matrix; another seed chooses others."""
    cells = [(strategy, policy) for policy in policies for strategy in strategies]
    random.Random(seed).shuffle(cells)
    covered = {cell: pairs(cell) for cell in cells}
    missing: set[Pair] = set().union(*covered.values())
    chosen: list[Key] = []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(covered[cell] & missing)))
        missing -= covered[chosen[-1]]
    return sorted(chosen, key=lambda cell: strategies.index(cell[0]))
