"""Synchronized batch norms on CUDA, two processes on one GPU."""

from __future__ import annotations

import pytest
import torch

from support.norms import Direct
from support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_torchs_kernels_normalize_by_the_whole_batch(ranks: Ranks) -> None:
    for found in ranks.run(Direct("cuda")):
        for whole, synchronized in found:
            torch.testing.assert_close(synchronized, whole)
