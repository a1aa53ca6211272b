"""A part of the tables for CI: every two of strategy, mode and flags, every row of the others, in cells by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

from conformance.rows import ROWS

Key = tuple[str, str]
Pair = tuple[tuple[str, object], ...]


def pairs(cell: Key) -> set[Pair]:
    """Every two of what a cell is made of; in the tables of models and of optimizers, the row and the column."""
    strategy, name = cell
    row = ROWS[name]
    if not row.declared:
        table = row.of != "llama"
        return {(("models", table), ("strategy", strategy)), (("row", name), ("models", table))}
    values = {
        "strategy": strategy,
        "mode": row.policy.mode,
        "pins": row.policy.pins,
        "checkpointing": row.policy.checkpointing,
    }
    return set(combinations(values.items(), 2))


def choose(cells: Iterable[Key], seed: str) -> list[Key]:
    """Of ``cells``, some in which every pair occurs that occurs in them; another seed chooses others."""
    cells = list(cells)
    order = list(dict.fromkeys(strategy for strategy, _ in cells))
    random.Random(seed).shuffle(cells)
    covered = {cell: pairs(cell) for cell in cells}
    missing: set[Pair] = set().union(*covered.values())
    chosen: list[Key] = []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(covered[cell] & missing)))
        missing -= covered[chosen[-1]]
    return sorted(chosen, key=lambda cell: order.index(cell[0]))
