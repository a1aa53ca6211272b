"""What CI runs of the matrix: nothing is left out in pairs, and the seed says which cells."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.families import FAMILIES
from conformance.policies import MODES
from conformance.rows import TABLES
from conformance.sample import choose, pairs
from conformance.strategies import STRATEGIES

TABLE = {name: [(column, row) for column in columns for row in rows] for name, (rows, columns) in TABLES.items()}
WHOLE = [cell for cells in TABLE.values() for cell in cells]


@given(st.text())
@settings(max_examples=4)
def test_every_pair_of_strategy_mode_and_flags_and_every_optimizer_and_family_is_in_it(seed: str) -> None:
    chosen = choose(WHOLE, seed)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, WHOLE))
    assert len(set(chosen)) == len(chosen)
    assert len(set(chosen) & set(TABLE["plan"])) <= 1.1 * len(STRATEGIES) * len(MODES)
    rows, columns = TABLES["optimizers"]
    assert len(set(chosen) & set(TABLE["optimizers"])) <= 1.5 * max(len(rows), len(columns))
    assert len(set(chosen) & set(TABLE["families"])) == len(FAMILIES)
    assert chosen == choose(WHOLE, seed)


def test_another_commit_chooses_other_cells() -> None:
    assert choose(WHOLE, "a") != choose(WHOLE, "b")


def test_in_time_every_cell_is_chosen() -> None:
    plan = TABLE["plan"]
    assert set().union(*(choose(plan, str(seed)) for seed in range(40))) == set(plan)
