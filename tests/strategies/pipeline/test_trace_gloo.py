"""The schedule as it ran: every micro-batch in every stage, and as many in flight as the planner counts."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from lightning_mp.planner.speed import bubble
from lightning_mp.strategies.pipeline.trace import Work
from support.pipeline import Fit
from support.ranks import Ranks

pytestmark = pytest.mark.gloo

STAGES, MICROBATCHES = 2, 8
#: by rank
IN_FLIGHT = {"1f1b": {0: 2, 1: 1}, "gpipe": {0: 8, 1: 8}}


#: how long a work takes, in units: a backward pass has twice the products
UNITS = {"forward": 1, "backward": 2}


def _idle(works: list[Work], stages: int) -> Fraction:
    """The share of all ranks' time that they wait if each does its works in the order they ran, every one at once."""
    waiting = {rank: [work for work in works if work.rank == rank] for rank in {work.rank for work in works}}
    ended: dict[tuple[int, str, int], int] = {}
    free = dict.fromkeys(waiting, 0)
    while any(waiting.values()):
        before = len(ended)
        for rank, left in waiting.items():
            while left and all(need in ended for need in _needs(left[0], stages)):
                work = left.pop(0)
                begin = max([free[rank], *(ended[need] for need in _needs(work, stages))])
                free[rank] = ended[work.stage, work.kind, work.microbatch] = begin + UNITS[work.kind]
        assert len(ended) > before, "the order waits for itself"
    return 1 - Fraction(sum(UNITS[work.kind] for work in works), len(free) * max(free.values()))


def _needs(work: Work, stages: int) -> list[tuple[int, str, int]]:
    if work.kind == "forward":
        return [(work.stage - 1, "forward", work.microbatch)] if work.stage else []
    later = [(work.stage + 1, "backward", work.microbatch)] if work.stage < stages - 1 else []
    return [(work.stage, "forward", work.microbatch), *later]


def _in_flight(works: list[Work]) -> dict[int, int]:
    """By rank, how many micro-batches it held activations of at most: forward begun, backward not ended."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    changes = [(w.rank, w.begin, 1) for w in works if w.kind == "forward"]
    changes += [(w.rank, w.end, -1) for w in works if w.kind == "backward"]
    for rank, _, change in sorted(changes, key=lambda each: each[1]):
        held[rank] = held.get(rank, 0) + change
        most[rank] = max(most.get(rank, 0), held[rank])
    return most


def _ran(folder: Path, ranks: Ranks, schedule: str, **given: int) -> list[Work]:
    ranks.run(Fit(schedule=schedule, steps=3, options=(("trace", str(folder)),), **given))
    return [Work(**json.loads(line)) for line in (folder / "pipeline.json").read_text().splitlines()]


@pytest.mark.parametrize("microbatches", [2, 8])
@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)])
def test_the_bubble_is_the_planners(
    schedule: str, per_rank: int, microbatches: int, tmp_path: Path, ranks: Ranks
) -> None:
    works = _ran(tmp_path, ranks, schedule, microbatches=microbatches)
    assert float(_idle(works, STAGES * per_rank)) == bubble(STAGES, microbatches, per_rank)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1)])
def test_the_bubble_of_four_stages_is_the_planners(schedule: str, per_rank: int, tmp_path: Path) -> None:
    with Ranks(4) as four:
        works = _ran(tmp_path, four, schedule, microbatches=8, stages=4)
    assert float(_idle(works, 4 * per_rank)) == bubble(4, 8, per_rank)


@pytest.mark.parametrize("schedule", IN_FLIGHT)
def test_what_ran_is_written_down(schedule: str, tmp_path: Path, ranks: Ranks) -> None:
    works = _ran(tmp_path, ranks, schedule, microbatches=MICROBATCHES)
    assert sorted((work.stage, work.kind, work.microbatch) for work in works) == sorted(
        (stage, kind, place)
        for stage in range(STAGES)
        for kind in ("forward", "backward")
        for place in range(MICROBATCHES)
    )
    assert _in_flight(works) == IN_FLIGHT[schedule]
    if schedule == "1f1b":  # lightning_mp.planner.memory: min(stages, micro-batches) of a stage's layers
        assert max(_in_flight(works).values()) == min(STAGES, MICROBATCHES)
    begun = {(w.stage, w.kind, w.microbatch): w.begin for w in works}
    assert all(begun[0, "forward", place] < begun[1, "forward", place] for place in range(MICROBATCHES))
    assert all(begun[1, "backward", place] < begun[0, "backward", place] for place in range(MICROBATCHES))
