"""Counting applied and skipped steps on the device, and reading them at most once a step."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_mp import LossScaling
from lightning_mp.numerics.loss_scale import LossScaler
from support.counting import HostReads
from support.loops import OPTIMIZERS

#: each step: was it skipped, and does a skip count against the budget, being at the floor
steps = st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20)


def optimizer(build: Any = OPTIMIZERS["SGD with momentum, for-loop"]) -> torch.optim.Optimizer:
    return build([torch.nn.Parameter(torch.zeros(1))])


ONE = optimizer()


def record(scaler: LossScaler, skipped: bool, counts: bool = True) -> None:
    scaler.update(1.0 if counts else 2.0)
    scaler.note_step(ONE, torch.tensor(float(skipped)))


def expected(trace: list[tuple[bool, bool]]) -> dict[str, int | bool]:
    """The counts by definition: the streak is what counted of the unbroken skips at the end."""
    streak = 0
    for skipped, counts in trace:
        streak = streak + counts if skipped else 0
    skips = sum(skipped for skipped, _ in trace)
    last = bool(trace) and trace[-1][0]
    return {"applied_steps": len(trace) - skips, "skipped_steps": skips, "streak": streak, "step_skipped": last}


@settings(max_examples=60)
@given(before=steps, after=steps, asked=st.lists(st.booleans(), min_size=40, max_size=40))
def test_the_counts_are_those_of_the_trace_whoever_asks_and_after_a_resume(
    before: list[tuple[bool, bool]], after: list[tuple[bool, bool]], asked: list[bool]
) -> None:
    first, second = LossScaler(LossScaling()), LossScaler(LossScaling())
    for step in before:
        record(first, *step)
    saved = json.loads(json.dumps(first.counts()))
    assert saved == expected(before)
    second.load_counts(saved)
    assert (second.counts(), second.attempts) == (saved, len(before))
    for step, ask in zip(after, asked, strict=False):
        record(second, *step)
        assert not ask or (second.step_skipped, second.streak >= 0) == (step[0], True)
    assert second.counts() == expected(before + after)


def test_counting_reads_nothing_and_what_was_read_is_kept_until_the_next_step() -> None:
    scaler = LossScaler(LossScaling())
    with HostReads() as reads:
        for skipped in (False, True, True):
            record(scaler, skipped)
    assert reads.count == 0
    with HostReads() as reads:
        assert all(scaler.step_skipped for _ in range(3))
    assert reads.count == 1
    assert [(scaler.skipped_steps, scaler.applied_steps, scaler.streak) for _ in range(3)] == [(2, 1, 2)] * 3
    assert isinstance(scaler.skipped, int), "read once"
    record(scaler, False)
    assert not scaler.step_skipped
    assert isinstance(scaler.skipped, torch.Tensor)


def test_a_flag_is_fp32_whatever_the_default_dtype() -> None:
    """Under manual optimization the default may be bf16, which cannot count past 256."""
    scaler = LossScaler()
    torch.set_default_dtype(torch.bfloat16)
    try:
        flag = scaler.found_inf(ONE)
        for _ in range(300):
            scaler.note_step(ONE, torch.ones_like(flag))
    finally:
        torch.set_default_dtype(torch.float32)
    assert (flag.dtype, scaler.skipped_steps, scaler.streak) == (torch.float32, 300, 300)
