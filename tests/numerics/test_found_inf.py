"""``FoundInf``: whose flag decides which step, over ranks and over optimizers, and how often the host asks."""

from __future__ import annotations

import pytest
import torch

from lightning_mp.numerics.found_inf import FoundInf
from support.counting import HostReads

CPU = torch.device("cpu")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def flag(skipped: bool) -> torch.Tensor:
    return torch.tensor(float(skipped))


def test_each_optimizer_has_a_flag_until_its_gradients_are_dropped() -> None:
    flags, (one, other) = FoundInf(), (optimizer(), optimizer())
    flags.of(one, CPU).fill_(1)
    assert (flags.of(one, CPU).item(), flags.of(other, CPU).item()) == (1, 0)
    flags.drop(id(one))
    assert flags.of(one, CPU).item() == 0


def test_a_flag_is_fp32_whatever_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert FoundInf().of(optimizer(), CPU).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)


def test_a_flag_is_reduced_over_ranks_where_there_are_others() -> None:
    flags, mine = FoundInf(), flag(False)
    flags.reduce_(mine)
    assert mine.item() == 0
    flags.sync_with(lambda tensor: tensor.fill_(1) and None)  # another rank overflowed
    flags.reduce_(mine)
    assert mine.item() == 1


@pytest.mark.parametrize("steps", [[False], [True], [False, True], [True, False], [False, False], [False, True, False]])
@pytest.mark.parametrize("optimizers", [1, 2])
def test_a_group_of_steps_is_skipped_where_one_of_them_is(steps: list[bool], optimizers: int) -> None:
    flags, stepping = FoundInf(), [optimizer() for _ in range(optimizers)]
    for number, skipped in enumerate(steps):
        flags.end_step(stepping[number % optimizers], flag(skipped))
    assert flags.group_open
    assert [flags.stepped(one) for one in stepping] == [number < len(steps) for number in range(optimizers)]
    assert flags.take_group().item() == any(steps)
    assert not flags.group_open


@pytest.mark.parametrize("skipped", [False, True])
def test_the_last_step_is_read_once(skipped: bool) -> None:
    flags, found = FoundInf(), flag(skipped)
    flags.begin_step(found)
    assert flags.last_read is None
    with HostReads() as reads:
        assert [flags.skipped, flags.read(found), flags.skipped] == [skipped] * 3
    assert (reads.count, flags.last_read) == (1, skipped)
    assert flags.read(flag(not skipped)) is not skipped  # another's flag is asked for itself


def test_the_flag_of_a_step_that_was_read_as_applied_serves_again_and_no_other() -> None:
    for skipped, serves in ((False, True), (True, False)):
        flags, found = FoundInf(), flag(skipped)
        flags.begin_step(found)
        assert flags.of(optimizer(), CPU) is not found  # nobody knows yet that it is 0
        flags.clear()
        assert flags.skipped is skipped
        assert (flags.of(optimizer(), CPU) is found) is serves


def test_a_checkpoint_brings_back_whether_the_last_step_was_skipped() -> None:
    flags = FoundInf()
    flags.begin_step(flag(False))
    flags.restore(True)
    with HostReads() as reads:
        assert flags.skipped
    assert reads.count == 0


def test_a_step_is_under_way_until_it_ends_or_fails() -> None:
    flags = FoundInf()
    with flags.stepping():
        assert flags.under_way
        with flags.stepping():
            pass
        assert flags.under_way
    with pytest.raises(ZeroDivisionError), flags.stepping():
        raise ZeroDivisionError
    assert not flags.under_way
