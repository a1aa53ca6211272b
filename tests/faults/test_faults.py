"""One run of every fault, and short healthy ones."""

from __future__ import annotations

import pytest

from faults import inject, run
from faults.scenarios import HEALTHY, SCENARIOS
from lightning_mp.monitor.health import throughput
from support.clock import SteadyClock

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a step takes is up to the model and the fault alone; `make faults` asks the machine's own clock."""
    clock = SteadyClock()
    monkeypatch.setattr(throughput, "time", clock)
    monkeypatch.setattr(inject, "time", clock)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=scenario.title, marks=pytest.mark.gloo if scenario.world > 1 else ())
        for number, scenario in enumerate(SCENARIOS)
    ],
)
def test_it_is_found(number: int) -> None:
    (verdict,) = run.row(number, seeds=1).verdicts
    assert verdict.good, verdict
    assert verdict.false == ()


@pytest.mark.parametrize(("title", "precision", "options"), HEALTHY)
def test_nothing_is_found_where_nothing_is_wrong(title: str, precision: str, options: dict[str, object]) -> None:
    assert run.healthy(title, precision, options, steps=300).alerts == ()
