"""Every strategy on the oldest hosts that the package allows (`make test-oldest`), and on those at hand elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from support.gloo import run_ranks

from lightning_mp.strategies.registry import STRATEGIES
from oldest import smoke

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.timeout(600)]

#: `fsdp` is another name for fsdp2
NAMES = [name for name in STRATEGIES if name not in ("fsdp", smoke.ALONE)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks saw; DeepSpeed compiles its CPU collectives on its first run."""
    return run_ranks(smoke.run, NAMES, str(tmp_path_factory.mktemp("two")), timeout=580)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (found,) = run_ranks(smoke.run, [smoke.ALONE], str(tmp_path_factory.mktemp("one")), world=1)
    return found


@pytest.mark.parametrize("name", [smoke.ALONE, *NAMES])
def test_it_fits_saves_and_resumes(name: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    for found in [alone] if name == smoke.ALONE else ranks:
        (losses, applied), (resumed, applied_in_all) = found[name]
        assert (len(losses), applied) == (6, 6)
        assert (resumed, applied_in_all) == (losses[3:], 6)
        assert losses[-1] < losses[0]
        assert losses == pytest.approx(alone[smoke.ALONE][0][0], rel=1e-3)
