"""Every strategy on the oldest hosts that the package allows (`make test-oldest`), and on those at hand elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_mp.strategies.registry import STRATEGIES
from oldest.smoke import ALONE, Resumed
from support.ranks import Ranks, run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run on one process."""
    (found,) = run_ranks(Resumed(ALONE, tmp_path_factory.mktemp("alone")), world=1)
    return found


# `fsdp` is another name for fsdp2
@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "fsdp"])
def test_it_fits_saves_and_resumes(name: str, ranks: Ranks, alone: Any, tmp_path: Path) -> None:
    for (losses, applied), (resumed, applied_in_all) in (
        [alone] if name == ALONE else ranks.run(Resumed(name, tmp_path))
    ):
        assert (len(losses), applied) == (6, 6)
        assert (resumed, applied_in_all) == (losses[3:], 6)
        assert losses[-1] < losses[0]
        assert losses == pytest.approx(alone[0][0], rel=1e-3)
