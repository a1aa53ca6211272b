"""The schedule as it ran: every micro-batch in every stage, and as many in flight as the planner counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_mp.strategies.pipeline.trace import Work, in_flight
from support.pipeline import Fit
from support.ranks import Ranks

pytestmark = pytest.mark.gloo

STAGES, MICROBATCHES = 2, 8
#: by rank
IN_FLIGHT = {"1f1b": {0: 2, 1: 1}, "gpipe": {0: 8, 1: 8}}


@pytest.mark.parametrize("schedule", IN_FLIGHT)
def test_what_ran_is_written_down(schedule: str, tmp_path: Path, ranks: Ranks) -> None:
    ranks.run(Fit(schedule=schedule, microbatches=MICROBATCHES, steps=3, options=(("trace", str(tmp_path)),)))
    works = [Work(**json.loads(line)) for line in (tmp_path / "pipeline.json").read_text().splitlines()]
    assert sorted((work.stage, work.kind, work.microbatch) for work in works) == sorted(
        (stage, kind, place)
        for stage in range(STAGES)
        for kind in ("forward", "backward")
        for place in range(MICROBATCHES)
    )
    assert in_flight(works) == IN_FLIGHT[schedule]
    if schedule == "1f1b":  # lightning_mp.planner.memory: min(stages, micro-batches) of a stage's layers
        assert max(in_flight(works).values()) == min(STAGES, MICROBATCHES)
    begun = {(w.stage, w.kind, w.microbatch): w.begin for w in works}
    assert all(begun[0, "forward", place] < begun[1, "forward", place] for place in range(MICROBATCHES))
    assert all(begun[1, "backward", place] < begun[0, "backward", place] for place in range(MICROBATCHES))
    assert (tmp_path / "pipeline.svg").read_text().count("<rect") == len(works)
