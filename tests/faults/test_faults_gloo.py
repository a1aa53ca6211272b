"""A fault on one rank of two is found there."""

from __future__ import annotations

import pytest

from faults import run
from faults.scenarios import SCENARIOS

SHARED = [number for number, scenario in enumerate(SCENARIOS) if scenario.world > 1]


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("number", SHARED, ids=[SCENARIOS[number].title for number in SHARED])
def test_the_rank_is_named(number: int) -> None:
    (verdict,) = run.row(number, seeds=1).verdicts
    assert verdict.good, verdict
