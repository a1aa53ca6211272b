"""A user's script under torchrun and Lightning's own launchers, on loopback, and how it ends if a rank fails."""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support import launching
from support.launching import Ended

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
#: from the first rank's failure until everything is over
SECONDS = 60
#: what a rank printed before it ended, with torch's prefix
_ERROR = re.compile(r"^\[rank(\d)\]: ((?:\w+\.)*\w*Error\b.*)$", re.MULTILINE)
Launch = Callable[[Path], Ended]


def _launch(*, torchrun: bool = False, **options: Any) -> Launch:
    def launch(folder: Path) -> Ended:
        how = launching.torchrun(*launching.on_loopback()) if torchrun else [sys.executable]
        return launching.run([*how, *launching.script(**options, out=folder)], folder / "log")

    return launch


TRAINS: dict[str, tuple[Launch, str]] = {
    "torchrun, zero2": (_launch(torchrun=True, strategy="deepspeed_zero2"), "TorchElasticEnvironment"),
    "plain, ddp": (_launch(strategy="ddp"), "LightningEnvironment"),
    "a notebook's, ddp": (_launch(strategy="ddp", start_method="fork"), "LightningEnvironment"),
}
#: rank 1 fails while the other waits in a collective
FAILS: dict[str, Launch] = {
    "torchrun, zero2, a step": _launch(torchrun=True, strategy="deepspeed_zero2", fail="step"),
    "torchrun, fsdp2, setup": _launch(torchrun=True, strategy="fsdp2", fail="setup"),
}
REFUSED = "plain, a plan that cannot run"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Ended, Path]]:
    launches = {name: launch for name, (launch, _) in TRAINS.items()} | FAILS
    launches[REFUSED] = _launch(strategy="fsdp2", fail="plan")

    @cache
    def launch(name: str) -> tuple[Ended, Path]:
        folder = tmp_path_factory.mktemp("launch")
        return launches[name](folder), folder

    return launch


@pytest.mark.parametrize("name", TRAINS)
def test_it_trains_and_both_ranks_agree(launched: Any, name: str) -> None:
    ended, folder = launched(name)
    assert ended.code == 0, ended.output[-4000:]
    assert not ended.left
    ranks = launching.seen(folder)
    assert [rank["rank"] for rank in ranks] == [0, 1]
    assert {rank["environment"] for rank in ranks} == {TRAINS[name][1]}
    assert {(rank["world"], rank["steps"]) for rank in ranks} == {(2, 4)}  # 8 batches, of which each has its half
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert float((folder / "0.after").read_text()) == ranks[0]["weights"]  # in the process that was started, too


def test_every_launcher_and_strategy_trains_to_the_same_weights(launched: Any) -> None:
    ends = [launching.seen(launched(name)[1])[0]["weights"] for name in TRAINS]
    assert ends == pytest.approx([ends[0]] * len(ends), rel=1e-6)


@pytest.mark.parametrize("name", FAILS)
def test_a_failing_rank_ends_all_and_speaks_first(launched: Any, name: str) -> None:
    ended, folder = launched(name)
    assert ended.code, ended.output[-4000:]
    assert not ended.left, "a process outlived the others"
    assert ended.at - (folder / "failed").stat().st_mtime < SECONDS
    errors = _ERROR.findall(ended.output)
    assert errors[0] == ("1", "KeyError: 'planned'"), errors


def test_a_plan_that_cannot_run_is_refused_by_every_rank(launched: Any) -> None:
    ended, _ = launched(REFUSED)
    assert ended.code
    assert not ended.left
    errors = _ERROR.findall(ended.output)
    assert {rank for rank, error in errors if "PlanError" in error} == {"0", "1"}
    assert all("PlanError" in error for _, error in errors), errors
    assert "no such module" in ended.output
