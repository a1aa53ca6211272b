"""One rank's gradient stops being finite after the backward pass: every rank skips, and they stay together."""

from __future__ import annotations

import pytest
import torch

from support.last_look import BAD, Changed
from support.models import same_weights
from support.ranks import Ranks
from support.sharded import BAD_RANK

pytestmark = pytest.mark.gloo

CASES = [
    *(Changed(host, mode) for host in ("ddp", "fsdp1", "fsdp2") for mode in ("bf16-mixed", "16-mixed")),
    *(Changed(host, mode, "hand") for host in ("ddp", "fsdp2") for mode in ("bf16-mixed", "16-mixed")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.host}-{case.mode}-{case.by}")
def test_every_rank_skips(ranks: Ranks, case: Changed) -> None:
    one, other = ranks.run(case)
    assert one["skipped"] == other["skipped"] == [step == BAD for step in range(8)]
    assert same_weights(one["weights"], other["weights"])
    assert all(bool(torch.isfinite(weight).all()) for weight in one["weights"].values())


@pytest.mark.parametrize("host", ["ddp", "fsdp1", "fsdp2"])
def test_the_error_names_the_rank_that_changed_it(ranks: Ranks, host: str) -> None:
    one, other = ranks.run(Changed(host, "bf16-mixed", allowed=0))
    assert one["named"] == other["named"]
    rank, parameter, changed = one["named"]
    assert rank == BAD_RANK
    assert parameter.startswith("net.")
    assert changed
