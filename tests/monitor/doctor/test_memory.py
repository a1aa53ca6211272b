"""Whether a run fits is said before it starts, with the cheapest change that does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp import MixedPrecisionPlan, make_strategy
from lightning_mp.planner import predict_memory
from lightning_mp.policy.hardware import Device
from support.doctor import Wrapped, found

#: wide activations: 4096 rows of 512 in each of four blocks
ROWS = 4096
PLAN = MixedPrecisionPlan("32-true", tf32="high")


def _module() -> Wrapped:
    blocks = [nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)) for _ in range(4)]
    return Wrapped(nn.Sequential(*blocks), lambda parameters: torch.optim.AdamW(parameters, eps=1e-6))


BATCH = (torch.ones(ROWS, 64), torch.ones(ROWS, 64))


@dataclass(frozen=True)
class Case:
    """A device's share of the peak, a plan, and words of the fix; ``None``: it fits."""

    share: float
    plan: MixedPrecisionPlan
    fix: str | None


CASES = {
    "fits": Case(1.2, PLAN, None),
    "too many rows": Case(0.5, PLAN, "accumulate_grad_batches="),
    "too many weights": Case(0.02, PLAN, "strategy='mp_fsdp2' on"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_run_that_will_not_fit_is_told_what_fits(case: Case) -> None:
    peak = predict_memory(_module(), BATCH, case.plan).peak_bytes
    device = Device("cuda", "a small GPU", (8, 0), memory=int(case.share * peak))
    finding = found(_module(), case.plan, "auto", {}, batch=BATCH, device=device).get("will_not_fit")
    assert (finding is None) == (case.fix is None)
    if finding is not None and case.fix is not None:
        assert case.fix in finding.fix
        assert finding.severity == "error"


def test_the_change_that_is_named_fits() -> None:
    peak = predict_memory(_module(), BATCH, PLAN).peak_bytes
    device = Device("cuda", "a small GPU", (8, 0), memory=peak // 2)
    fix = found(_module(), PLAN, "auto", {}, batch=BATCH, device=device)["will_not_fit"].fix
    rows = int(fix.split("micro-batches of ")[1].split()[0])

    def needs(count: int) -> int:
        return predict_memory(_module(), tuple(tensor[:count] for tensor in BATCH), PLAN).peak_bytes

    assert needs(rows) <= 0.95 * (peak // 2) < needs(rows + 1)


@pytest.mark.parametrize(("memory", "expected"), [(2**20, True), (2**24, False)])
def test_without_a_batch_weights_and_gradients_are_looked_at(memory: int, expected: bool) -> None:
    device: Any = Device("cuda", "a small GPU", (8, 0), memory=memory)
    assert ("will_not_fit" in found(_module(), PLAN, "auto", {}, device=device)) == expected


@pytest.mark.parametrize(("strategy", "advised"), [("ddp", True), ("fsdp2", False), ("deepspeed_zero3", False)])
def test_sharding_that_is_in_use_is_not_advised(strategy: str, advised: bool) -> None:
    device = Device("cuda", "a small GPU", (8, 0), memory=2**16)
    made = strategy if strategy == "ddp" else make_strategy(strategy, PLAN)
    fix = found(_module(), PLAN, made, {"devices": 2}, device=device)["will_not_fit"].fix
    assert ("mp_fsdp2" in fix) == advised
