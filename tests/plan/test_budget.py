"""The budget of skips: on which step a run ends, and how seldom the host has to look for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_mp.numerics.loss_scale import LossScaler
from lightning_mp.plan.diagnosis import Verdict
from lightning_mp.plan.eager import EagerEngine
from lightning_mp.policy import LossScaling, NonFinite, PrecisionPolicy

CPU = torch.device("cpu")


ONE = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def budget(rule: NonFinite, scaling: LossScaling | None = None) -> tuple[EagerEngine, LossScaler]:
    scaler = LossScaler(scaling)
    policy = PrecisionPolicy(
        precision="32-true" if scaling is None else "16-mixed", loss_scaling=scaling, nonfinite=rule
    )
    engine = EagerEngine(policy, device=CPU, scaler=scaler, distributed=False, global_step=lambda: scaler.attempts)
    return engine, scaler


@dataclass(frozen=True)
class Case:
    """Steps, ``x`` a skip and ``.`` none, and the words of the first verdict on the last of them; none: no verdict."""

    steps: str
    allowed: int
    words: str | None
    action: Any = "skip"


CASES = [
    Case("....", 0, None),
    Case(".x", 0, "a step with non-finite gradients, 0 allowed"),
    Case(".xx.xx.", 2, None),
    Case("..xxx", 2, "3 steps in a row with non-finite gradients, 2 allowed"),
    Case("x.x.x.xxx", 2, "3 steps in a row with non-finite gradients, 2 allowed"),
    Case(".x", 5, "a step with non-finite gradients, 0 allowed", "raise"),
    Case("xxx", 0, None, "ignore"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_ends_on_the_step_that_exceeds_the_budget(case: Case) -> None:
    watched, steps = budget(NonFinite(action=case.action, max_consecutive=case.allowed))
    found = list[Verdict | None]()
    for step in case.steps:
        steps.note_step(ONE, torch.tensor(float(step == "x")))
        found.append(watched.verdict())
    assert found == [*[None] * (len(case.steps) - 1), None if case.words is None else Verdict(case.words)]


@pytest.mark.parametrize("allowed", [0, 1, 4])
def test_a_healthy_run_is_looked_at_no_oftener_than_the_budget_asks(
    allowed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched, steps = budget(NonFinite(max_consecutive=allowed))
    looks, streak = list[int](), LossScaler.streak
    monkeypatch.setattr(
        LossScaler, "streak", property(lambda self: looks.append(self.attempts) or streak.__get__(self))
    )
    for _ in range(20):
        steps.note_step(ONE, torch.tensor(0.0))
        assert watched.verdict() is None
    assert looks == list(range(1, 21, allowed + 1))


def test_after_a_restart_it_looks_at_once_and_a_new_start_forgets_the_skips() -> None:
    watched, steps = budget(NonFinite(max_consecutive=3))
    for skip in (0.0, 1.0, 1.0, 1.0):  # the look after the first step is good for three more
        steps.note_step(ONE, torch.tensor(skip))
    watched.reset_skip_streak()
    steps.note_step(ONE, torch.tensor(1.0))
    assert (watched.verdict(), steps.streak) == (None, 1)


@pytest.mark.parametrize("at_min", ["raise", "hold"])
def test_an_overflow_at_the_floor_ends_a_run_whose_rule_says_so(at_min: Any) -> None:
    scaling = LossScaling.deepspeed(initial_scale_power=2, hysteresis=1, at_min=at_min)
    watched, scaler = budget(NonFinite(max_consecutive=100), scaling)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    found = list[bool]()
    for _ in range(4):  # 4 → 2 → 1 → 1
        optimizer.param_groups[0]["params"][0].grad = torch.full((1,), torch.inf)
        scaler.unscale_(optimizer)
        scaler.step_checked(optimizer)
        scaler.update()
        verdict = watched.verdict()
        found.append(verdict is not None and verdict.at_min)
    assert found == [False, False, at_min == "raise", at_min == "raise"]
