"""Going on with another number of processes: FSDP2 does, ZeRO says how many it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_mp import LossScaling, make_strategy
from lightning_mp.checkpoints import CheckpointFormatError
from support.gloo import run_ranks
from support.models import Regression
from support.oracles import plan_for
from support.running import fit
from support.saving import ResumableBatches, SaveAt

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

STRATEGIES = ("fsdp2", "deepspeed_zero2", "deepspeed_zero3")


def _arguments(name: str, processes: int) -> tuple[Any, dict[str, Any]]:
    plan = plan_for("16-mixed", LossScaling(init_scale=32.0, hysteresis=2))
    return plan, {"plugins": [plan], "strategy": make_strategy(name, plan), "devices": processes}


def save(folder: str) -> None:
    """Two processes save after four steps, under each strategy."""
    for name in STRATEGIES:
        _, arguments = _arguments(name, 2)
        fit(Regression(), data=ResumableBatches(), callbacks=[SaveAt(Path(folder) / name, 4)], **arguments)


def go_on(folder: str) -> dict[str, Any]:
    """One process takes each up; how far it came, or what it said, before any step."""
    found: dict[str, Any] = {}
    for name in STRATEGIES:
        plan, arguments = _arguments(name, 1)
        module = Regression()
        try:
            fit(module, data=ResumableBatches(), ckpt_path=Path(folder) / name / "4.ckpt", **arguments)
            found[name] = (plan.applied_steps, len(module.losses))
        except CheckpointFormatError as error:
            found[name] = (str(error), len(module.losses))
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("elsewhere"))
    run_ranks(save, folder)
    (found,) = run_ranks(go_on, folder, world=1)
    return found


def test_fsdp2_goes_on_with_another_number_of_processes(ended: dict[str, Any]) -> None:
    assert ended["fsdp2"] == (8, 4)


@pytest.mark.parametrize("name", ["deepspeed_zero2", "deepspeed_zero3"])
def test_zero_says_how_many_processes_it_takes_before_any_step(ended: dict[str, Any], name: str) -> None:
    message, steps = ended[name]
    assert steps == 0
    assert "a ZeRO run of 2 processes, to go on with 1" in message
    assert "start 2 processes" in message
