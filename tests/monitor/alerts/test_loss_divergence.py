from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitor.alerts.feed import noise, rows, said, steps


def falling(count: int = 300, seed: int = 0, start: float = 4.0, end: float = 2.0) -> list[float]:
    """A loss that falls as losses do, with noise."""
    shape = [end + (start - end) * math.exp(-step / 50) for step in range(count)]
    return [loss + 0.1 * (draw - 1) for loss, draw in zip(shape, noise(count, seed=seed), strict=True)]


@pytest.mark.parametrize(
    ("after", "found"),
    [
        ([3.5, 3.6, 3.7, 4.0], [302]),
        ([50.0, 1e4, 1e9], [302]),
        ([50.0, 2.0, 50.0, 2.0, 50.0], []),  # bad batches
        ([2.3] * 20, []),  # a harder stretch of data
    ],
    ids=["back where it began", "away", "bad batches", "a harder stretch"],
)
def test_three_readings_in_a_row_that_lose_what_was_learned(after: list[float], found: list[int]) -> None:
    assert steps("loss_divergence", rows(loss=falling() + after)) == found


def test_the_event_says_how_far() -> None:
    (event,) = said("loss_divergence", rows(loss=[4.0] * 5 + [2.0] * 100 + [9.0] * 4))
    assert event.severity == "error"
    assert event.evidence == {"loss": 9.0, "lowest": 2.0, "first": 4.0, "readings": 3}


def test_it_is_told_once_and_again_only_after_the_loss_came_back() -> None:
    losses = falling() + [9.0, 2.0] * 3 + [9.0] * 100
    assert len(steps("loss_divergence", rows(loss=losses))) == 1
    assert len(steps("loss_divergence", rows(loss=losses + falling()[200:] + [9.0] * 5))) == 2


def test_a_loss_near_zero_may_multiply() -> None:
    """Learned by heart: from 10 to a millionth, and a thousandfold of that is no loss of progress."""
    losses = [10.0] * 10 + [1e-6] * 200 + [1e-3] * 10
    assert steps("loss_divergence", rows(loss=losses)) == []


def test_a_negative_loss_is_a_loss() -> None:
    losses = [loss - 100 for loss in falling()]
    assert steps("loss_divergence", rows(loss=losses)) == []
    assert steps("loss_divergence", rows(loss=[*losses, -96.0, -96.0, -95.0])) == [302]


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_what_is_no_number_is_not_judged(missing: float | None) -> None:
    losses: list[float | None] = [*falling(), missing, missing, missing, 2.0]
    assert steps("loss_divergence", rows(loss=losses)) == []


@settings(max_examples=30)
@given(seed=st.integers(0, 2**16), level=st.floats(-50, 50), spread=st.floats(0.01, 0.4))
def test_noise_around_a_level_is_no_divergence(seed: int, level: float, spread: float) -> None:
    losses = [level + draw - 1 for draw in noise(600, spread=spread, seed=seed)]
    assert steps("loss_divergence", rows(loss=losses)) == []
