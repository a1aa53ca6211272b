"""One rank's fault is named on every rank, under every strategy, and the run goes on as if nobody had looked."""

from __future__ import annotations

from typing import Any

import pytest

from support import guarded
from support.gloo import run_ranks
from support.models import same_weights
from support.nonfinite import BAD, FAULTS

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

STRATEGIES = ("ddp", "fsdp2", "fsdp1", "deepspeed_zero1", "deepspeed_zero3")
HOW = ("gradient", "batch", "infinite loss")
#: strategy, mode, fault, the module's kind, gradient clipping
CASES: dict[str, tuple[Any, ...]] = {
    **{f"{name} {how}": (name, "16-mixed", how) for name in STRATEGIES for how in HOW},
    "fsdp2 bf16-mixed": ("fsdp2", "bf16-mixed", "gradient"),
    "ddp with statistics": ("ddp", "bf16-mixed", "gradient", "Statistics"),
    **{f"{name} by hand": (name, "bf16-mixed", "gradient", "ByHand", None) for name in ("ddp", "fsdp2")},
}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What both ranks brought back, from one start of two processes."""
    return run_ranks(guarded.run, [(key, "replayed", case, {}) for key, case in CASES.items()], timeout=240)


@pytest.mark.parametrize("key", CASES)
def test_the_guilty_rank_is_named_everywhere_and_only_for_the_bad_batch(ranks: Any, key: str) -> None:
    strategy, _, how, *_ = CASES[key]
    one, other = (rank[key] for rank in ranks)
    assert not isinstance(one, str), one
    assert not isinstance(other, str), other
    assert one["diagnoses"] == other["diagnoses"]
    module, _, bad_loss = FAULTS[how]
    bad: tuple[Any, ...] = (guarded.GUILTY, module, bad_loss, BAD)
    if strategy == "deepspeed_zero3" and not bad_loss:  # backward is the engine's alone
        bad = (None, None, False, BAD)
    assert one["diagnoses"][BAD] == bad
    healthy = [diagnosis for batch, diagnosis in enumerate(one["diagnoses"]) if batch != BAD]
    assert {diagnosis[1:3] for diagnosis in healthy} == {(None, False)}


@pytest.mark.parametrize("key", CASES)
def test_a_run_of_which_every_batch_is_replayed_is_the_same_run(ranks: Any, key: str) -> None:
    for rank in ranks:
        assert same_weights(rank[key]["asked"], rank[key]["plain"])
