"""One fault in one run: the events that came of it."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from faults.judge import WITHIN, Expected, Row, Verdict, judge
from faults.scenarios import SCENARIOS, Scenario, data, patient
from lightning_mp import MixedPrecisionPlan
from lightning_mp.callbacks.nonfinite_guard import NonFiniteGuard
from lightning_mp.callbacks.training_health import TrainingHealth
from lightning_mp.monitor.events import Event
from support.ranks import run_ranks
from support.running import fit

#: when spike and divergence are armed, and throughput: faults begin within the ten steps after
ARMED = 200
TIMEOUT = timedelta(seconds=60)


def began(seed: int) -> int:
    """The step a fault begins at."""
    return ARMED + seed % 10


def fault(number: int, seed: int) -> tuple[Expected, list[Event]]:
    """Fault ``number`` in the run of ``seed``; what had to come of it, and what came."""
    scenario = SCENARIOS[number]
    injection = scenario.make(seed, began(seed))
    first = injection.at + scenario.shows_after
    # one more than needed: an event may be told in the hook that follows its step
    steps = first + WITHIN + 1
    batches = data(scenario.model, steps, seed)
    injection.prepare(batches)
    module = patient(scenario.model, seed)
    with tempfile.TemporaryDirectory() as folder:
        watching = watchers(scenario.by, Path(folder))
        with quietly():
            callbacks = [injection, *watching]
            fit(module, data=batches, callbacks=callbacks, max_steps=steps, **_host(scenario))
    events = [event for callback in watching for event in callback.events]
    expected = Expected(scenario.kinds, injection.at, first, injection.module, injection.rank)
    return expected, sorted(events, key=lambda event: event.step)


def watchers(by: str, folder: Path) -> list[Any]:
    """The callbacks that are on trial, as a user would write them."""
    health = TrainingHealth(run_dir=folder, every_n_steps=1, report=False)
    return [NonFiniteGuard(run_dir=folder), health] if by == "guard" else [health]


def _host(scenario: Scenario) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if scenario.by == "plan":
        options["plugins"] = [MixedPrecisionPlan(scenario.precision, **scenario.options)]
    else:
        options["precision"] = scenario.precision
    if scenario.world > 1:
        strategy = DDPStrategy(timeout=TIMEOUT, process_group_backend="gloo")
        options |= {"strategy": strategy, "devices": scenario.world, "use_distributed_sampler": False}
    return options


def row(number: int, seeds: int) -> Row:
    """One line of the table."""
    scenario = SCENARIOS[number]
    if scenario.world == 1:
        verdicts = [judge(*fault(number, seed)) for seed in range(seeds)]
    else:
        timeout = 60.0 + 60.0 * seeds
        verdicts = run_ranks(Verdicts(number, seeds), scenario.world, timeout)[0]
    return Row(scenario.title, tuple(verdicts))


@dataclass(frozen=True)
class Verdicts:
    """On each rank; the first rank's events are the ones that are written down."""

    number: int
    seeds: int

    def run(self) -> list[Verdict]:
        return [judge(*fault(self.number, seed)) for seed in range(self.seeds)]


def healthy(title: str, precision: str, options: Mapping[str, Any], steps: int) -> Row:
    """A run in which nothing is wrong."""
    module, plan = patient("language", seed=0), MixedPrecisionPlan(precision, **options)
    batches = data("language", steps, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        (health,) = watchers("plan", Path(folder))
        with quietly():
            fit(module, data=batches, callbacks=[health], plugins=[plan], max_steps=steps)
    alerts = [str(event) for event in health.events if event.is_alert]
    if options and not plan.skipped_steps:
        alerts.append("no step overflowed: this is not the run it is meant to be")
    return Row(f"{title}: {steps} steps, {plan.skipped_steps} skipped", alerts=tuple(alerts))


@contextmanager
def quietly() -> Iterator[None]:
    """What is told on the console is in the events, too; here there are hundreds of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
