"""What CI runs of the matrix: nothing is left out in pairs, and the seed says which cells."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.policies import MODES, POLICIES
from conformance.sample import choose, pairs
from conformance.strategies import STRATEGIES

WHOLE = [(strategy, policy) for strategy in STRATEGIES for policy in POLICIES]


@given(st.text())
@settings(max_examples=10, deadline=None)
def test_every_pair_of_strategy_mode_and_flags_is_in_it(seed: str) -> None:
    chosen = choose(STRATEGIES, POLICIES, seed)
    assert set().union(*map(pairs, chosen)) == set().union(*map(pairs, WHOLE))
    assert len(set(chosen)) == len(chosen) <= 1.1 * len(STRATEGIES) * len(MODES)
    assert chosen == choose(STRATEGIES, POLICIES, seed)


def test_another_commit_chooses_other_cells() -> None:
    assert choose(STRATEGIES, POLICIES, "a") != choose(STRATEGIES, POLICIES, "b")


def test_in_time_every_cell_is_chosen() -> None:
    assert set().union(*(choose(STRATEGIES, POLICIES, str(seed)) for seed in range(40))) == set(WHOLE)
