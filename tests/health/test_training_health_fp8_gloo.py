"""The scales of FP8 layers in two processes: those of all ranks, whatever is sharded."""

from pathlib import Path

import pytest

from support import fp8
from support.ranks import Ranks

pytest.importorskip("torchao")
pytestmark = [pytest.mark.gloo, pytest.mark.slow]
SPLIT = {"tensor_parallel": 2, "tp_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, "wrap": "Block"}


def test_every_rank_reads_the_scales_of_all(ranks: Ranks, folder: Path) -> None:
    whole = ranks.call(fp8.scales, "ddp", folder)
    assert whole[0] == whole[1]
    assert [pair is not None for pair in whole[0]] == [True, False] * 4
    sharded = ranks.call(fp8.scales, "fsdp2", folder, wrap="Block")
    assert sharded == whole
    zero = ranks.call(fp8.scales, "deepspeed_zero2", folder)
    assert zero == whole
    # a part of each layer: its input is another one
    split = ranks.call(fp8.scales, "fsdp2", folder, **SPLIT)
    assert split[0] == split[1]
    assert split[0][0] is not None
