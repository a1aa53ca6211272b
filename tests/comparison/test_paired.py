"""The paired difference: its interval against Student's t, and the verdict against the margin."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from lightning_mp.comparison.results import Comparison, PlanResult, RunResult, compare_losses, student_t
from lightning_mp.policy import PrecisionPolicy


# as scipy has them
@pytest.mark.parametrize(
    ("freedom", "t"),
    [(1, 12.706205), (2, 4.302653), (3, 3.182446), (4, 2.776445), (7, 2.364624), (30, 2.042272)],
)
def test_students_t(freedom: int, t: float) -> None:
    assert student_t(freedom) == pytest.approx(t, abs=5e-4)
    assert student_t(100) == student_t(30)


@dataclass(frozen=True)
class Case:
    name: str
    second: list[float | None]
    verdict: str
    first: tuple[float, ...] = (2.0, 3.0, 4.0)
    margin: float | None = 0.1

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("itself", [2.0, 3.0, 4.0], "same"),
    Case("within the margin", [2.01, 3.02, 4.01], "same"),
    Case("worse", [2.3, 3.31, 4.29], "worse"),
    Case("better", [1.7, 2.69, 3.71], "better"),
    Case("beyond the margin on one side only", [2.09, 3.12, 4.09], "worse"),
    Case("noise", [2.5, 2.5, 4.0], "undecided"),
    Case("one pair is left", [2.3, None, None], "undecided"),
    Case("none is left", [None, None, None], "undecided"),
    Case("diverged once", [2.0, math.nan, 4.0], "worse"),
    Case("the first diverged too", [2.0, math.nan, 4.0], "same", first=(2.0, math.nan, 4.0)),
    Case("half a percent of the first's mean loss", [2.014, 3.014, 4.014], "same", margin=None),
    Case("more than that", [2.016, 3.016, 4.016], "worse", margin=None),
    Case("one seed", [2.0], "undecided", first=(2.0,)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_verdict(case: Case) -> None:
    first, second = dict(enumerate(case.first)), dict(enumerate(case.second))
    found = compare_losses(("a", first), ("b", second), case.margin)
    assert (found.first, found.second, found.verdict) == ("a", "b", case.verdict)
    assert found.reason


def test_the_interval_is_the_means_second_minus_first() -> None:
    found = compare_losses(("a", {0: 1.0, 1: 1.0, 2: 1.0}), ("b", {0: 1.1, 1: 1.2, 2: 1.6}), None)
    assert found.differences == pytest.approx({0: 0.1, 1: 0.2, 2: 0.6})
    assert found.mean_difference == pytest.approx(0.3)
    # as scipy has it
    assert found.interval == pytest.approx((-0.357242, 0.957242), abs=1e-4)
    assert found.margin == pytest.approx(0.005)


@pytest.mark.parametrize("width", [80, 110])
def test_the_table_leaves_nothing_out_of_a_cell(width: int) -> None:
    runs = tuple(RunResult(seed, (1.0,), 1.2 + seed, 61234.5 + 900 * seed, "tokens", 2**35 + seed) for seed in range(3))
    names = "32-true", "bf16-mixed", "a_plan_with_quite_a_long_name"
    plans = tuple(PlanResult(name, PrecisionPolicy(precision="bf16-mixed"), runs) for name in names)
    losses = [(name, {run.seed: run.final_loss for run in runs}) for name in names]
    pairs = tuple(compare_losses(losses[0], other, None) for other in losses[1:])
    text = Comparison(plans, pairs, (0, 1, 2), 30, 3, {}).to_text(width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for whole in ("bf16-mixed", "62,134 ± 900", "32,768.0 ± 0.0", "same") if width == 110 else ("62,134", "same"):
        assert whole in text
