"""Numbers on their way to the host: in order, when they have arrived, at most three steps later, all at the end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mp.monitor.health.to_host import LAG, Sent, ToHost
from support.counting import Asked

CPU = torch.device("cpu")


class Event:
    """One of CUDA's, as far as it is asked."""

    def __init__(self, arrived: bool) -> None:
        self.arrived, self.waited = arrived, False

    def query(self) -> bool:
        return self.arrived

    def synchronize(self) -> None:
        self.waited = True


class Slow(ToHost):
    """A device that has arrived at some steps."""

    def __init__(self, arrived: list[bool], ranks: int = 1) -> None:
        super().__init__(CPU, ranks)
        self.events = [Event(each) for each in arrived]
        self._coming = iter(self.events)

    def _start(self, *args: Any) -> Sent:
        sent = super()._start(*args)
        sent.event = next(self._coming)
        return sent


def looked_at(to_host: ToHost, steps: int, *, end: bool = True) -> list[list[float | None]]:
    """Of each step, the steps whose numbers came; behind them those of the end."""
    found: list[list[float | None]] = []
    for step in range(steps):
        found.append([])
        to_host.send({"step": torch.tensor(float(step))}, then=lambda read, _: found[-1].append(read["step"]))
        to_host.deliver()
    if end:
        found.append([])
        to_host.deliver(wait=True)
    return found


def test_without_an_event_everything_is_there_at_once() -> None:
    assert looked_at(ToHost(CPU, ranks=2), 3) == [[0], [1], [2], []]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_late_is_waited_for_after_three_steps_and_the_rest_at_the_end(ranks: int) -> None:
    to_host = Slow([False] * 6, ranks)
    assert looked_at(to_host, 6) == [[], [], [], [0], [1], [2], [3, 4, 5]]
    assert all(event.waited for event in to_host.events)
    assert LAG == 3


def test_a_shorter_lag_is_kept() -> None:
    to_host = Slow([False] * 3)
    to_host._lag = 1
    assert looked_at(to_host, 3) == [[], [0], [1], [2]]


def test_what_has_arrived_is_looked_at_in_order() -> None:
    assert looked_at(Slow([True, False, True, True, True]), 5) == [[0], [], [], [], [1, 2, 3, 4], []]


def test_ranks_that_have_to_do_the_same_do_not_look_who_is_first() -> None:
    assert looked_at(Slow([True] * 5, ranks=2), 5, end=False) == [[], [], [], [0], [1]]


def test_every_kind_of_value_and_no_question_to_a_tensor() -> None:
    """Buffers are used again, one that is read has room for the next."""
    found: list[Any] = []
    to_host = ToHost(CPU)
    values = {"device": torch.tensor(2.0), "half": torch.tensor(3.0).half(), "host": 7, "missing": None}
    tables = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0]])
    to_host.read({"first": torch.tensor(1.0)})
    with Asked() as asked:
        for _ in range(3):
            to_host.send(values, *tables, then=lambda *read: found.append(read))
            to_host.deliver()
    assert asked.count == 0
    assert len(to_host._free) == 1
    expected = {"device": 2.0, "half": 3.0, "host": 7.0, "missing": None}, [[[1.0, 2.0], [3.0, 4.0]], [[5.0]]]
    assert found == [expected] * 3
