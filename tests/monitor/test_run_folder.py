from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_mp.errors import PlanError
from lightning_mp.monitor.events import Event
from lightning_mp.monitor.run_folder import RunFolder

EVENT = Event(step=3, kind="loss_plateau", severity="warning", value=float("nan"))
HOLDS = """
import sys
from lightning_mp.monitor.run_folder import RunFolder
folder = RunFolder.open(sys.argv[1], writer="TrainingHealth", owner=object())
print("open", flush=True)
sys.stdin.read()
"""


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_readings_and_events_are_on_disk_at_once_in_strict_json(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", writer="A", owner="a run")
    folder.metrics(1, {"train/loss": float("nan")})
    folder.event(EVENT)
    folder.write("run.json", {"x": float("inf")})
    assert _lines(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "train/loss": None}]
    assert _lines(tmp_path / "run" / "events.jsonl")[0]["kind"] == "loss_plateau"
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {"x": None}
    folder.close("A")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"metrics.jsonl", "events.jsonl", "run.json"}


def test_two_callbacks_of_one_run_share_it_and_two_of_one_kind_do_not(tmp_path: Path) -> None:
    run = object()
    first = RunFolder.open(tmp_path, writer="A", owner=run)
    assert RunFolder.open(tmp_path, writer="B", owner=run) is first
    with pytest.raises(PlanError, match="where a A writes already"):
        RunFolder.open(tmp_path, writer="A", owner=run)
    with pytest.raises(PlanError, match="Give each run a run_dir of its own"):
        RunFolder.open(tmp_path, writer="C", owner=object())
    first.close("A")
    first.close("B")
    RunFolder.open(tmp_path, writer="C", owner=object()).close("C")


def test_another_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(PlanError, match="another run is writing"):
            RunFolder.open(tmp_path, writer="A", owner=object())
    finally:
        other.communicate("", timeout=60)
    RunFolder.open(tmp_path, writer="A", owner=object()).close("A")


@pytest.mark.parametrize(("fresh", "left"), [(True, 1), (False, 2)])
def test_a_new_run_clears_what_an_earlier_one_wrote_and_a_resumed_one_goes_on(
    tmp_path: Path, fresh: bool, left: int
) -> None:
    (tmp_path / "notes.txt").write_text("the user's own")
    for number, clears in enumerate((True, fresh)):
        folder = RunFolder.open(tmp_path, writer="A", owner=object(), fresh=clears)
        folder.metrics(number, {})
        folder.close("A")
    assert len(_lines(tmp_path / "metrics.jsonl")) == left
    assert (tmp_path / "notes.txt").exists()
