"""One rank's fault is named on every rank, under every strategy, and the run goes on as if nobody had looked."""

from __future__ import annotations

from typing import Any

import pytest

from support.guarded import GUILTY, Replayed
from support.models import same_weights
from support.nonfinite import BAD, FAULTS
from support.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

STRATEGIES = ("ddp", "fsdp2", "fsdp1", "deepspeed_zero1", "deepspeed_zero3")
CASES: dict[str, Replayed] = {
    **{f"{name} gradient": Replayed(name, "16-mixed", "gradient") for name in STRATEGIES},
    "ddp batch": Replayed("ddp", "16-mixed", "batch"),
    "zero3 infinite loss": Replayed("deepspeed_zero3", "16-mixed", "infinite loss"),
    "fsdp2 bf16-mixed": Replayed("fsdp2", "bf16-mixed", "gradient"),
}


@pytest.mark.parametrize("key", CASES)
def test_the_guilty_rank_is_named_everywhere_and_only_for_the_bad_batch(ranks: Ranks, key: str) -> None:
    case = CASES[key]
    one, other = ranks.run(case)
    assert one["diagnoses"] == other["diagnoses"]
    assert one["batches"][BAD] == other["batches"][BAD] == BAD
    module, _, bad_loss = FAULTS[case.how]
    bad: tuple[Any, ...] = (GUILTY, module, bad_loss)
    if case.strategy.startswith("deepspeed") and not bad_loss:  # backward is the engine's alone
        bad = (None, None, False)
    assert one["diagnoses"][BAD] == bad
    healthy = [diagnosis for batch, diagnosis in enumerate(one["diagnoses"]) if batch != BAD]
    assert {diagnosis[1:] for diagnosis in healthy} == {(None, False)}
    for result in (one, other):  # and it is the same run as without a replay
        assert same_weights(result["asked"], result["plain"])
