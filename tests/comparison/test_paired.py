"""The paired difference: its standard error, and the verdict against the margin."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_mp import PrecisionPolicy
from lightning_mp.comparison.results import Comparison, PlanResult, RunResult, compare_losses, conclusion, write
from record.report.browser import Shown, chromium

THREE = (2.0, 3.0, 4.0)
#: losses of the first and of the second plan, the margin, and the verdict
CASES: dict[str, tuple[tuple[float, ...], list[float | None], float | None, str]] = {
    "itself": (THREE, [2.0, 3.0, 4.0], 0.1, "same"),
    "within the margin": (THREE, [2.01, 3.02, 4.01], 0.1, "same"),
    "worse": (THREE, [2.3, 3.31, 4.29], 0.1, "worse"),
    "better": (THREE, [1.7, 2.69, 3.71], 0.1, "better"),
    "beyond the margin on one side only": (THREE, [2.09, 3.12, 4.09], 0.1, "worse"),
    "noise": (THREE, [2.5, 2.5, 4.0], 0.1, "undecided"),
    "one pair is left": (THREE, [2.3, None, None], 0.1, "undecided"),
    "none is left": (THREE, [None, None, None], 0.1, "undecided"),
    "diverged once": (THREE, [2.0, math.nan, 4.0], 0.1, "worse"),
    "the first diverged too": ((2.0, math.nan, 4.0), [2.0, math.nan, 4.0], 0.1, "same"),
    "half a percent of the first's mean loss": (THREE, [2.014, 3.014, 4.014], None, "same"),
    "more than that": (THREE, [2.016, 3.016, 4.016], None, "worse"),
    "one seed": ((2.0,), [2.0], 0.1, "undecided"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name: str) -> None:
    first, second, margin, verdict = CASES[name]
    found = compare_losses(("a", dict(enumerate(first))), ("b", dict(enumerate(second))), margin)
    assert (found.first, found.second, found.verdict) == ("a", "b", verdict)
    assert found.reason


def test_the_standard_error_is_the_means_second_minus_first() -> None:
    found = compare_losses(("a", {0: 1.0, 1: 1.0, 2: 1.0}), ("b", {0: 1.1, 1: 1.2, 2: 1.6}), None)
    assert found.differences == pytest.approx({0: 0.1, 1: 0.2, 2: 0.6})
    assert found.mean_difference == pytest.approx(0.3)
    # as scipy.stats.sem has it
    assert found.standard_error == pytest.approx(0.152753, abs=1e-6)
    assert found.margin == pytest.approx(0.005)


STEPS = 20


def _plan(name: str, *gaps: float | None) -> PlanResult:
    """Runs of straight lines that lie ``gaps`` above 2 - step / 20; None is a run that failed."""
    runs = [
        RunResult(seed, error="OutOfMemoryError: <full>")
        if gap is None
        else RunResult(
            seed, tuple(2 - step / 20 + gap for step in range(STEPS)), 1.075 + gap, 1000.0 + seed, "tokens", 9
        )
        for seed, gap in enumerate(gaps)
    ]
    return PlanResult(name, PrecisionPolicy(precision="bf16-mixed"), tuple(runs))


def _compared(*plans: PlanResult) -> Comparison:
    losses = [(plan.name, {run.seed: run.final_loss for run in plan.runs}) for plan in plans]
    about = {"module": "<Net>", "machine": {"device": "a CPU", "type": "cpu"}, "versions": {"torch": "2.13.0"}}
    differences = tuple(compare_losses(losses[0], other, None) for other in losses[1:])
    return Comparison(plans, differences, tuple(run.seed for run in plans[0].runs), STEPS, 2, about)


def test_the_page_shows_the_curves_and_the_verdicts(tmp_path: Path) -> None:
    plans = (_plan("bf16", 0.0, 0.1, 0.2), _plan("fp8", 0.3, 0.4, 0.5), _plan("<i>full", 0.0, None, None))
    write(_compared(*plans), tmp_path)
    with chromium() as browser:
        for dark in (False, True):
            shown = Shown(browser, (tmp_path / "compare.html").as_uri(), dark=dark)
            charts = shown.charts()
            difference = "Loss minus bf16's, mean of 3 seeds ± 3 standard errors"
            assert list(charts) == [difference, "Loss, mean of 3 seeds"]
            (fp8, full) = charts[difference]["curves"]
            assert fp8["y"] == pytest.approx([0.3] * STEPS)
            assert full["y"] == pytest.approx([0.0] * STEPS)
            low, high = charts[difference]["y"]
            assert low < -0.005 < 0.3 < high  # the margin is in sight
            text = shown.page.inner_text("main")
            assert (
                text.index("On this CPU use bf16")
                < text.index("fp8: loss higher by 0.3, same speed")
                < text.index("tokens")
            )
            for expected in ("worse", "undecided", "OutOfMemoryError: <full>", "+0.3000", "<Net>", "margin"):
                assert expected in text
            shown.close()
            assert shown.messages == []
            assert not [url for url in shown.requests[1:] if not url.startswith(("data:", "blob:"))]


#: the losses of the second plan above those of the first, its speed, and the conclusion
CONCLUSIONS = {
    "faster": (
        (0.0, 0.001, 0.0),
        2.1,
        "use fp8: same loss within ±0.0054, 2.1 × faster, 38 % less memory, against bf16.",
    ),
    "slower": ((0.0, 0.001, 0.0), 0.25, "use bf16: same loss as fp8, 4.0 × faster."),
    "worse": ((0.3, 0.31, 0.3), 2.1, "use bf16: no other plan has its loss."),
    "undecided": ((-0.3, 0.3, 0.1), 2.1, "Not decided between bf16 and fp8: 0 is within 3 standard errors"),
}


@pytest.mark.parametrize("name", CONCLUSIONS)
def test_the_first_sentence_says_which_plan_to_use(name: str) -> None:
    gaps, speed, said = CONCLUSIONS[name]
    first, second = _plan("bf16", 0.0, 0.0, 0.0), _plan("fp8", *gaps)
    runs = [replace(run, rate=(run.rate or 0) * speed, peak_bytes=5_580) for run in second.runs]
    first = replace(first, runs=tuple(replace(run, peak_bytes=9_000) for run in first.runs))
    assert said in conclusion(_compared(first, replace(second, runs=tuple(runs))))
    assert str(_compared(first, second)).startswith(("On this CPU", "Not decided"))


def test_the_json_is_strict_and_has_every_loss(tmp_path: Path) -> None:
    write(_compared(_plan("one", 0.0, 0.1), _plan("other", 0.0, float("nan"))), tmp_path)
    found = json.loads((tmp_path / "compare.json").read_text(), parse_constant=pytest.fail)
    assert found["verdict"] == "worse"
    assert found["differences"][0]["differences"] == {"0": 0.0}
    assert found["plans"][1]["runs"][1]["final_loss"] is None
    assert [len(run["losses"]) for plan in found["plans"] for run in plan["runs"]] == [STEPS] * 4
