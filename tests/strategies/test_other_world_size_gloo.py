"""Going on with another number of processes: ZeRO says how many it takes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_mp import LossScaling, make_strategy
from lightning_mp.checkpoints import CheckpointFormatError
from support.models import Regression
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit
from support.saving import ResumableBatches, SaveAt

pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def _arguments(name: str, processes: int) -> tuple[Any, dict[str, Any]]:
    plan = plan_for("16-mixed", LossScaling(init_scale=32.0, hysteresis=2))
    return plan, {"plugins": [plan], "strategy": make_strategy(name, plan), "devices": processes}


@dataclass(frozen=True)
class Save:
    """Two processes save after four steps."""

    folder: Path
    name: str

    def run(self) -> None:
        _, arguments = _arguments(self.name, 2)
        fit(Regression(), data=ResumableBatches(), callbacks=[SaveAt(self.folder, 4)], **arguments)


@dataclass(frozen=True)
class Resume:
    """One process takes it up; how far it came, or what it said, before any step."""

    folder: Path
    name: str

    def run(self) -> tuple[int | str, int]:
        plan, arguments = _arguments(self.name, 1)
        module = Regression()
        try:
            fit(module, data=ResumableBatches(), ckpt_path=self.folder / "4.ckpt", **arguments)
        except CheckpointFormatError as error:
            return str(error), len(module.losses)
        return plan.applied_steps, len(module.losses)


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with Ranks(1) as started:
        yield started


@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3"])
def test_zero_says_how_many_processes_it_takes_before_any_step(
    ranks: Ranks, alone: Ranks, tmp_path: Path, name: str
) -> None:
    ranks.run(Save(tmp_path, name))
    ((message, steps),) = alone.run(Resume(tmp_path, name))
    assert steps == 0
    assert "a ZeRO run of 2 processes, to be resumed with 1" in message
    assert "Start 2 processes" in message
