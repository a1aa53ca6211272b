"""Every strategy file of the package carries a run out, in two processes, and the runs are the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import lightning_mp.configs
from lightning_mp.cli.train import run as train
from support.comparing import of_sums
from support.ranks import Ranks
from support.training import QUICK, losses

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

STRATEGIES = sorted(path.stem for path in (Path(lightning_mp.configs.__file__).parent / "strategy").glob("*.yaml"))


@dataclass(frozen=True)
class Losses:
    """Those of two steps under a strategy."""

    name: str
    folder: Path
    devices: int = 2

    def run(self) -> list[float]:
        out = str(self.folder / self.name)
        chosen = (
            f"strategy={self.name}",
            "plan=bf16",
            f"trainer.devices={self.devices}",
            "trainer.max_steps=2",
            f"run_dir={out}",
        )
        assert train([*QUICK, *chosen], lambda _: None) == 0
        return losses(out)


DDP = partial(Losses, "ddp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_of_the_package_trains_the_default_model(ranks: Ranks, folder: Path, name: str) -> None:
    pytest.importorskip("deepspeed")
    found = ranks.run(Losses(name, folder))[0]
    # the stages of a pipeline share one batch, as large as one process's
    beside = Losses("auto", folder / "alone", devices=1).run() if name == "pipeline" else ranks.run(DDP(folder))[0]
    # a loss of products in bf16, rounded once in the forward pass, before the first step and after it
    assert found == pytest.approx(beside, rel=of_sums(2, "bf16-mixed"))
    assert len(found) == 2
