"""The processes that run the other tests' cases: a case that fails, dies or hangs is one failed case."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from support.ranks import RankError, Ranks

pytestmark = pytest.mark.gloo


@dataclass(frozen=True)
class Summed:
    """A collective; which processes it ran in."""

    number: int

    def run(self) -> Any:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        total = torch.tensor(self.number + dist.get_rank())
        dist.all_reduce(total)
        return total, os.getpid()


@dataclass(frozen=True)
class Spoilt:
    """Rank 1 does not come to the collective where rank 0 waits."""

    how: str

    def run(self) -> Any:
        print("about to be", self.how)
        if os.environ["RANK"] == "0":
            return Summed(0).run()
        if self.how == "failing":
            raise KeyError("planned")
        if self.how == "dead":
            os._exit(3)
        time.sleep(600)
        return None


@pytest.fixture(scope="module")
def own() -> Iterator[Ranks]:
    with Ranks() as started:
        started.run(Summed(0))
        yield started


def test_results_come_by_rank_from_processes_that_go_on(own: Ranks) -> None:
    first, second = own.run(Summed(1)), own.run(Summed(2))
    assert [total.item() for total, _ in (*first, *second)] == [3, 3, 5, 5]
    assert [pid for _, pid in first] == [pid for _, pid in second]
    assert first[0][1] != first[1][1]


def test_a_case_runs_once(own: Ranks) -> None:
    assert own.run(Summed(1)) is own.run(Summed(1))


@pytest.mark.parametrize(
    ("how", "said"),
    [("failing", "KeyError: 'planned'"), ("dead", "died, exit code 3"), ("hanging", "test_ranks.py")],
)
def test_a_spoilt_case_is_told_by_rank_and_costs_the_next_nothing(own: Ranks, how: str, said: str) -> None:
    """With what was printed; of a rank that hangs, with the line it hangs in."""
    pids = [pid for _, pid in own.run(Summed({"failing": 3, "dead": 4, "hanging": 5}[how]))]
    start, own.seconds = time.monotonic(), 5.0
    with pytest.raises(RankError) as error:
        own.run(Spoilt(how))
    assert time.monotonic() - start < 30
    _, _, of_second = str(error.value).rpartition("rank 1: ")
    assert said in str(error.value)
    assert f"about to be {how}" in of_second
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    own.seconds = 120.0
    again = own.run(Summed({"failing": 13, "dead": 14, "hanging": 15}[how]))
    assert {pid for _, pid in again}.isdisjoint(pids)
