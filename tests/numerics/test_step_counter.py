"""Counting applied and skipped steps on the device, and reading them at most once a step."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mp.numerics.step_counter import StepCounter
from support.counting import HostReads

#: each step: was it skipped, and does a skip count against the budget
steps = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20)


def record(counter: StepCounter, skipped: bool, counts: bool = True) -> None:
    found = torch.tensor(float(skipped))
    counter.begin_step(found)
    counter.record(torch.tensor(counts))


def expected(trace: list[tuple[bool, bool]]) -> dict[str, int | bool]:
    """The counts by definition: the streak is what counted of the unbroken skips at the end."""
    streak = 0
    for skipped, counts in trace:
        streak = streak + counts if skipped else 0
    skips = sum(skipped for skipped, _ in trace)
    last = bool(trace) and trace[-1][0]
    return {"applied_steps": len(trace) - skips, "skipped_steps": skips, "streak": streak, "step_skipped": last}


@settings(max_examples=60)
@given(trace=steps)
def test_the_counts_are_those_of_the_trace(trace: list[tuple[bool, bool]]) -> None:
    counter = StepCounter()
    for skipped, counts in trace:
        record(counter, skipped, counts)
    assert counter.state_dict() == expected(trace)
    assert counter.attempts == len(trace)
    assert (counter.applied_steps, counter.skipped_steps) == (expected(trace)["applied_steps"], counter.skipped_steps)


@settings(max_examples=60)
@given(before=steps, after=steps)
def test_a_counter_resumes_from_a_state(before: list[tuple[bool, bool]], after: list[tuple[bool, bool]]) -> None:
    first, second = StepCounter(), StepCounter()
    for step in before:
        record(first, *step)
    saved = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(saved)
    assert second.state_dict() == saved
    for step in after:
        record(second, *step)
    assert second.state_dict() == expected(before + after)


def test_before_the_first_step_nothing_was_skipped() -> None:
    counter = StepCounter()
    assert not counter.step_skipped
    assert (counter.applied_steps, counter.skipped_steps, counter.streak, counter.attempts) == (0, 0, 0, 0)


def test_recording_reads_nothing() -> None:
    counter = StepCounter()
    flags = [torch.tensor(float(skipped)) for skipped in (0, 1, 1)]
    with HostReads() as reads:
        for flag in flags:
            counter.begin_step(flag)
            counter.record(flag)
    assert reads.count == 0


def test_the_flag_of_a_step_is_read_once_whoever_asks() -> None:
    counter, flag = StepCounter(), torch.ones(())
    with HostReads() as reads:
        counter.begin_step(flag)
        assert counter.read(flag)
        counter.record()
        assert counter.step_skipped
        assert counter.step_skipped
    assert reads.count == 1
    with HostReads() as reads:
        assert not counter.read(torch.zeros(())), "another flag is read for itself"
    assert reads.count == 1


def test_the_counts_are_read_once_a_step() -> None:
    class Copies(HostReads):
        """A list of several values is copied to the host at once."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += func is torch.ops.aten.stack.default
            return super().__torch_dispatch__(func, types, args, kwargs)

    counter = StepCounter()
    record(counter, skipped=True)
    with Copies() as copies:
        for _ in range(3):
            assert (counter.skipped_steps, counter.applied_steps, counter.streak) == (1, 0, 1)
    assert copies.count == 1


@pytest.mark.parametrize("counts", [True, 1, torch.tensor(1.0), torch.tensor(True)], ids=repr)
def test_counts_may_be_a_number_or_a_tensor(counts: object) -> None:
    counter, flag = StepCounter(), torch.ones(())
    counter.begin_step(flag)
    counter.record(counts)  # type: ignore[arg-type]
    assert counter.streak == 1


def test_opening_the_next_step_asks_anew() -> None:
    counter = StepCounter()
    record(counter, skipped=True)
    assert counter.step_skipped
    record(counter, skipped=False)
    assert not counter.step_skipped


@settings(max_examples=40)
@given(trace=steps, asked=st.lists(st.booleans(), min_size=20, max_size=20))
def test_asking_in_between_changes_no_count(trace: list[tuple[bool, bool]], asked: list[bool]) -> None:
    counter = StepCounter()
    for (skipped, counts), ask in zip(trace, asked, strict=False):
        found = torch.tensor(float(skipped))
        counter.begin_step(found)
        if ask:  # as an optimizer that is not fused makes the host do
            assert counter.read(found) is skipped
        counter.record(torch.tensor(counts))
        if ask:
            assert counter.step_skipped is skipped
            assert counter.streak >= 0
    assert counter.state_dict() == expected(trace)


def test_a_step_whose_flag_was_read_costs_no_other_read() -> None:
    """Where the optimizer is not fused the host knows already: the counts need not wait for the device again."""
    counter = StepCounter()
    for skipped in (True, False, True):
        found = torch.tensor(float(skipped))
        with HostReads() as reads:
            counter.begin_step(found)
            counter.read(found)
            counter.record(torch.tensor(True))
            assert counter.step_skipped is skipped
        assert reads.count == 1


CPU = torch.device("cpu")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def flag(skipped: bool) -> torch.Tensor:
    return torch.tensor(float(skipped))


def test_each_optimizer_has_a_flag_until_its_gradients_are_dropped() -> None:
    flags, (one, other) = StepCounter(), (optimizer(), optimizer())
    flags.of(one, CPU).fill_(1)
    assert (flags.of(one, CPU).item(), flags.of(other, CPU).item()) == (1, 0)
    flags.drop(id(one))
    assert flags.of(one, CPU).item() == 0


def test_a_flag_is_fp32_whatever_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert StepCounter().of(optimizer(), CPU).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_a_flag_is_reduced_over_ranks_where_there_are_others() -> None:
    flags, mine = StepCounter(), flag(False)
    flags.reduce_(mine)
    assert mine.item() == 0
    flags.sync_with(lambda tensor: tensor.fill_(1) and None)  # another rank overflowed
    flags.reduce_(mine)
    assert mine.item() == 1


@pytest.mark.parametrize("steps", [[False], [True], [False, True], [True, False], [False, False], [False, True, False]])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_group_of_steps_is_skipped_where_one_of_them_is(steps: list[bool], optimizers: int) -> None:
    flags, stepping = StepCounter(), [optimizer() for _ in range(optimizers)]
    for number, skipped in enumerate(steps):
        flags.end_step(stepping[number % optimizers], flag(skipped))
    assert flags.group_open
    assert [flags.stepped(one) for one in stepping] == [number < len(steps) for number in range(optimizers)]
    assert flags.take_group().item() == any(steps)
    assert not flags.group_open


def test_the_flag_of_a_step_that_was_read_as_applied_serves_again_and_no_other() -> None:
    for skipped, serves in ((False, True), (True, False)):
        flags, found = StepCounter(), flag(skipped)
        flags.begin_step(found)
        assert flags.of(optimizer(), CPU) is not found  # nobody knows yet that it is 0
        flags.clear()
        assert flags.step_skipped is skipped
        assert (flags.of(optimizer(), CPU) is found) is serves
