"""Every strategy file of the package carries a run out, in two processes, and the runs are the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import lightning_mp.configs
from lightning_mp.cli.training.application import train
from support.gloo import run_ranks
from support.training import QUICK, losses

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

STRATEGIES = sorted(path.stem for path in (Path(lightning_mp.configs.__file__).parent / "strategy").glob("*.yaml"))


def each(folder: str) -> dict[str, list[float]]:
    """Two steps under every strategy; the losses by its name."""
    os.environ["XDG_CACHE_HOME"] = folder
    found: dict[str, list[float]] = {}
    for name in STRATEGIES:
        out = f"{folder}/{name}"
        chosen = (f"strategy={name}", "plan=bf16", "trainer.devices=2", "trainer.max_steps=2", f"run_dir={out}")
        assert train([*QUICK, *chosen], lambda _: None) == 0
        found[name] = losses(out)
    return found


def test_every_strategy_of_the_package_trains_the_default_model(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    by_name, _ = run_ranks(each, str(tmp_path), timeout=240)
    assert set(by_name) == set(STRATEGIES)
    for name, found in by_name.items():
        assert found == pytest.approx(by_name["ddp"], rel=2e-2), name
        assert len(found) == 2
