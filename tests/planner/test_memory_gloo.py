"""Predicted memory of a rank is what the allocator of one of two processes gives out, and what it holds."""

import pytest

from benchmarks.memory import HELD, SHARDED_CELLS, of_rank, predicted
from support.ranks import Ranks

#: of the peak, and of what is held
WITHIN, EXACT = 0.1, 0.02
MIXED = next(cell for cell in SHARDED_CELLS if cell.precision == "bf16-mixed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["`ddp`", "`fsdp2`", "`hsdp`"])
def test_a_rank_takes_and_holds_what_was_predicted(ranks: Ranks, name: str) -> None:
    peak, held = min(ranks.call(of_rank, MIXED, name), key=lambda answer: answer[0])
    found = predicted(MIXED, name)
    assert found.peak_bytes == sum(found.parts.values()) == pytest.approx(peak, rel=WITHIN)
    assert found.method == "traced"
    assert {part: found.held[part] for part in HELD} == pytest.approx(held, rel=EXACT)
