"""FSDP2 gathers in half precision what autocast alone computes with: half the bytes, and still the numbers of DDP."""

from __future__ import annotations

from typing import Any

import pytest

from support.comparing import same_runs
from support.fsdp2_halves import EQUAL, HEAD, LAYERS, Bytes, Kinds, PastItsPin, Read
from support.models import same_weights
from support.ranks import Ranks

pytestmark = pytest.mark.gloo

#: bytes that all gathers of a step bring in: 2 an element of the weights that qualify, 4 another
GATHERED = {"llama": 542_464, "gpt2": 684_288}
#: elements of a block, and of the rest, as they are cut on two processes
ELEMENTS = {"llama": (36_992, 32_320), "gpt2": (49_984, 20_352)}


@pytest.mark.parametrize("kind", GATHERED)
def test_bytes_gathered_and_kept(ranks: Ranks, kind: str) -> None:
    block, rest = ELEMENTS[kind]
    for result in ranks.run(Bytes(kind)):
        assert same_runs(result["ddp"], result["sharded"], 0.0)
        for step in result["steps"][1:]:  # in the first, ranks tell each other their order of units
            assert sum(step["gathered"]) == GATHERED[kind]
            blocks = sorted(step["gathered"])[-2 * LAYERS :] if kind == "gpt2" else step["gathered"]
            assert sum(size <= 1.01 * 2 * block for size in blocks) >= 2 * LAYERS
            assert sorted(step["reduced"]) == sorted([4 * block] * LAYERS + [4 * rest])
        assert result["kept"] == [0] * len(result["kept"])


def test_a_block_that_runs_several_times_is_reduced_once(ranks: Ranks) -> None:
    block, rest = ELEMENTS["llama"]
    for result in ranks.run(Bytes("one block")):
        assert same_runs(result["ddp"], result["sharded"], 1e-5)
        assert all(sorted(step["reduced"]) == [4 * rest, 4 * block] for step in result["steps"][1:])


@pytest.mark.parametrize("case", EQUAL)
def test_steps_are_ddps_to_the_last_bit(ranks: Ranks, case: str) -> None:
    results = ranks.run(EQUAL[case])
    for result in results:
        assert same_runs(result["ddp"], result["sharded"], 0.0)
    assert same_weights(*(result["sharded"]["weights"] for result in results))


def test_a_weight_read_elsewhere_is_refused_on_every_rank_with_the_pin_to_write(ranks: Ranks) -> None:
    for said in ranks.run(Read()):
        assert all(words in said for words in ("net.2.weight is fp16", "(pow, ", "pins={'net.2': 'fp32'}"))


@pytest.mark.parametrize("wrap", [Kinds, None])
def test_a_pinned_weight_that_is_computed_with_elsewhere_is_refused_with_its_pin(ranks: Ranks, wrap: Any) -> None:
    for said in ranks.run(Read(PastItsPin, HEAD, wrap)):
        assert "net.2.weight is pinned to fp32 ('net.2')" in said
        assert "(convolution, fsdp2_halves.py:" in said
