"""Where a run writes: one folder, whose files are its own."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_mp.errors import PlanError
from lightning_mp.record.events import Event
from lightning_mp.record.findings import CODES
from lightning_mp.record.run_folder import RunFolder, to_json

EVENT = Event(step=3, kind="loss_plateau", severity="warning", value=float("nan"))
HOLDS = """
import sys
from lightning_mp.record.run_folder import RunFolder
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
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == {
        "format_version": 1,
        "written_by": "lightning_mp",
        "x": None,
    }
    folder.close("A")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"metrics.jsonl", "events.jsonl", "run.json"}


def test_two_callbacks_of_one_run_share_it_and_two_of_one_kind_do_not(tmp_path: Path) -> None:
    run = object()
    first = RunFolder.open(tmp_path, writer="A", owner=run)
    assert RunFolder.open(tmp_path, writer="B", owner=run) is first
    with pytest.raises(PlanError, match="Two A callbacks write to"):
        RunFolder.open(tmp_path, writer="A", owner=run)
    with pytest.raises(PlanError, match="Pass run_dir= to give this run a folder of its own"):
        RunFolder.open(tmp_path, writer="C", owner=object())
    first.close("A")
    first.close("B")
    RunFolder.open(tmp_path, writer="C", owner=object()).close("C")


def test_another_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(PlanError, match="Another run is writing"):
            RunFolder.open(tmp_path, writer="A", owner=object())
    finally:
        other.communicate("", timeout=60)
    RunFolder.open(tmp_path, writer="A", owner=object()).close("A")


def test_a_new_run_replaces_what_an_earlier_one_wrote_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the user's own")
    theirs = ["metrics.jsonl", "audit.md", "pipeline.json", "nonfinite/step_000001_rank0.pt"]
    for _ in range(2):
        folder = RunFolder.open(tmp_path, writer="A", owner=object())
        assert [name for name in theirs if (tmp_path / name).exists()] == []
        folder.close("A")
        (tmp_path / "nonfinite").mkdir(exist_ok=True)
        (tmp_path / "nonfinite" / "mine.pt").touch()
        for name in theirs:
            (tmp_path / name).write_text("{}")
    assert (tmp_path / "notes.txt").exists()
    assert (tmp_path / "nonfinite" / "mine.pt").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "report.html", "run.json", "pipeline.json"])
@pytest.mark.parametrize("resumed_at", [None, 3])
def test_a_file_of_the_users_is_never_overwritten(tmp_path: Path, name: str, resumed_at: int | None) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(PlanError, match=f"holds {name}, which this package did not write"):
        RunFolder.open(tmp_path, writer="A", owner=object(), resumed_at=resumed_at)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder.open(tmp_path, writer="A", owner=object())
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    for step in range(3):
        folder.metrics(step, {})
    folder.event(EVENT)
    folder.close("A")
    assert [record.message.partition(";")[2] for record in caplog.records] == [
        " training goes on, with gaps in the files"
    ]
    assert len(_lines(tmp_path / "events.jsonl")) == 1


OVERFLOW = Event(
    step=17,
    kind="nonfinite_grad",
    severity="warning",
    rank=1,
    module="model.layers.3.mlp",
    parameter="model.layers.3.mlp.weight",
    value=float("inf"),
    evidence={"loss_scale": 1024.0},
    cause="the product overflows in fp16",
    advice="pin it to fp32",
    action="skip",
)


def test_it_round_trips_through_a_line_of_json() -> None:
    line = json.loads(to_json(OVERFLOW.to_dict()))
    assert line["value"] is None
    assert Event(**{**line, "value": float("inf")}) == OVERFLOW
    assert Event.from_dict(line) == replace(OVERFLOW, value=None)


def test_the_line_for_people_says_where_why_and_what_to_do() -> None:
    assert str(OVERFLOW) == (
        "step 17: nonfinite grad in rank 1, module 'model.layers.3.mlp', parameter 'model.layers.3.mlp.weight' "
        "(loss_scale 1,024). Likely cause: the product overflows in fp16. What to do: pin it to fp32. "
        "Action taken: skip"
    )


def test_every_code_is_stable_in_form_and_used_once() -> None:
    assert len(set(CODES.values())) == len(CODES)
    assert all(re.fullmatch(r"LMP\d{3}", code) for code in CODES.values())
