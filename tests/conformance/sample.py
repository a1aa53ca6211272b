"""A part of the tables for CI: every two of strategy, mode and flags, every row of the others, in cells by a seed."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import combinations

from conformance.rows import ROWS, FamilyRow

Key = tuple[str, str]
Pair = tuple[tuple[str, object], ...]


def pairs(cell: Key) -> set[Pair]:
    """Every two of what a cell is made of, in each table; of optimizers the row and the column, of families each."""
    strategy, name = cell
    row = ROWS[name]
    policy = {"mode": row.policy.mode, "pins": row.policy.pins, "checkpointing": row.policy.checkpointing}
    values: dict[str, object] = {"strategy": strategy, **policy}
    if isinstance(row, FamilyRow):
        return {(("family", row.family),)} | {(("families", True), *pair) for pair in combinations(values.items(), 2)}
    if not row.declared:
        return {(("optimizer", name),), (("optimizers", True), ("strategy", strategy))}
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
        cells = [cell for cell in cells if not covered[cell].isdisjoint(missing)]
    return sorted(chosen, key=lambda cell: order.index(cell[0]))
