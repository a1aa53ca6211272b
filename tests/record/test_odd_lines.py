"""Files of a run whatever is in them: damaged lines are lost, and nothing else; a newer format version is said."""

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.errors import PlanError
from lightning_mp.record.file_format import KEY, VERSION
from lightning_mp.record.report import summaries, write_report
from lightning_mp.record.report.load import load
from lightning_mp.record.run_folder import RunFolder
from record.report.runs import write_run

#: lines that hold no reading and no event
ODD = (
    b"",
    b"{",
    b"3",
    b"null",
    b'"text"',
    b"[1, 2]",
    b"[" * 100_000,
    b"{}",
    b'{"train/loss": 1.0}',
    b'{"step": null}',
    b'{"step": "3"}',
    b'{"step": 3.5}',
    b'{"step": -1}',
    b'{"step": true}',
    b'{"step": [3]}',
    b'{"step": 1e999}',
    b'{"step": ' + b"9" * 30 + b"}",
    b'{"step": ' + b"9" * 5000 + b"}",
    b'{"step": 3, "train/loss": "2.5", "severity": "warning", "kind": 3}',
    b'{"step": 3, "train/loss": [2.5], "severity": "loud", "kind": "loss_plateau"}',
    b'{"step": 3, "train/loss": {"a": 1}, "severity": {}, "kind": "loss_plateau"}',
    b'{"step": 3, "train/loss": true, "severity": "warning", "kind": "loss_plateau", "evidence": 3}',
    b'{"step": 3, "train/loss": "", "severity": "warning", "kind": "loss_plateau", "module": ["a"]}',
    b'{"step": 3, "train/loss": "", "severity": "warning", "kind": "loss_plateau", "advice": null}',
    b'{"step": 3, "train/loss": "", "severity": "warning", "kind": "loss_plateau", "rank": "first"}',
    b"\xff\xfe\x00",
)
WELL = {"step": 5, "kind": "loss_plateau", "severity": "warning"}


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def mixed(path: Path) -> list[bytes]:
    """Put odd lines between those of a file, and return the lines that were there."""
    whole = lines(path)
    text = b"\n".join(line for pair in zip(ODD, (whole * len(ODD))[: len(ODD)], strict=True) for line in pair)
    path.write_bytes(text + b"\n" + b"\n".join(whole) + b"\n")
    return whole


def test_a_report_loses_the_damaged_lines_and_nothing_else(tmp_path: Path) -> None:
    before = load(write_run(tmp_path), "run")
    for name in ("metrics.jsonl", "events.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"\n".join(ODD) + b"\n" + path.read_bytes() + b"\n".join(ODD))
    run = load(tmp_path, "run")
    assert (run.series, run.events) == (before.series, before.events)
    said = f"{2 * len(ODD):,} of {2 * len(ODD) + len(before.events):,} lines cannot be read"
    assert f"events.jsonl is damaged: {said}" in run.faults
    assert write_report(tmp_path).exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_resumed_run_drops_the_damaged_lines_and_keeps_the_others(tmp_path: Path, name: str) -> None:
    whole = lines(write_run(tmp_path) / name)
    mixed(tmp_path / name)
    RunFolder.open(tmp_path, writer="A", owner=object(), resumed_at=1_000).close("A")
    kept = lines(tmp_path / name)
    assert set(whole) <= set(kept)
    assert all(json.loads(line)["step"] >= 0 for line in kept)


def test_an_unknown_key_of_an_event_is_left_out_and_the_event_stays(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "events.jsonl").write_text(json.dumps({**WELL, "colour": "red", "evidence": {"a": [{}, None, 1e308]}}))
    run = load(tmp_path, "run")
    assert ([event.step for event in run.events], run.faults) == ([5], [])
    assert write_report(tmp_path).exists()


def test_numbers_that_are_too_large_are_no_readings(tmp_path: Path) -> None:
    write_run(tmp_path)
    names = ["train/loss", "val/loss", "health/memory_peak_gib", "health/tokens_per_s", "health/skipped_steps"]
    large = ["9" * 400, "1e999", "-1e999", "1e308", "NaN", "Infinity"]
    rows = [f'{{"step": {step}, "{name}": {text}}}' for name in names for step, text in enumerate(large)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    run = load(tmp_path, "run")
    assert run.faults == []
    assert run.series["train/loss"].values == [None, None, None, 1e308, None, None]
    assert write_report(tmp_path).exists()
    assert summaries(tmp_path)[0]["last_step"] == 5


ABOUT: tuple[Any, ...] = (3, None, "text", [], [{}], {}, {"device": ["a"]}, 10**400, True, float("inf"))


@pytest.mark.parametrize(
    "key", ["status", "error", "at", "machine", "versions", "strategy", "precision", "plan", "more"]
)
def test_a_report_is_written_whatever_run_json_holds(tmp_path: Path, key: str) -> None:
    path = write_run(tmp_path) / "run.json"
    about = json.loads(path.read_text())
    for value in ABOUT:
        path.write_text(json.dumps({**about, key: value}))
        run = load(tmp_path, "run")
        assert run.about.keys() - {key} == about.keys() - {key, KEY}
        assert write_report(tmp_path).exists()
        assert summaries(tmp_path)
    path.write_text(json.dumps({**about, "machine": {"memory_bytes": 10**400, "cpus": None}}))
    assert write_report(tmp_path).exists()


@pytest.mark.parametrize("name", ["run.json", "audit.json"])
@pytest.mark.parametrize("text", ["3", "[]", "null", "{", '"a"', "[" * 100_000])
def test_a_file_that_holds_something_else_is_left_out(tmp_path: Path, name: str, text: str) -> None:
    (write_run(tmp_path) / name).write_text(text)
    (fault,) = load(tmp_path, "run").faults
    assert fault == f"{name} is damaged and left out"
    assert write_report(tmp_path).exists()


@pytest.mark.parametrize("rows", [3, None, [3], [{}], [{"module": "a"}], [{"module": 3, "ok": True}]])
def test_a_report_loses_the_damaged_rows_of_an_audit(tmp_path: Path, rows: Any) -> None:
    path = write_run(tmp_path) / "audit.json"
    audit = json.loads(path.read_text())
    path.write_text(json.dumps({**audit, "rows": [*audit["rows"], *rows] if isinstance(rows, list) else rows}))
    run = load(tmp_path, "run")
    assert run.audit == (audit["rows"] if isinstance(rows, list) else [])
    assert run.faults == ["audit.json is damaged: 1 rows cannot be read"]
    assert write_report(tmp_path).exists()


@pytest.mark.parametrize("text", ["3", "[]", "null", "{", '{"written_by": ["lightning_mp"]}', "[" * 100_000])
def test_a_folder_whose_run_json_says_nothing_is_no_folder_of_ours(tmp_path: Path, text: str) -> None:
    (write_run(tmp_path) / "run.json").write_text(text)
    with pytest.raises(PlanError, match="which this package did not write"):
        RunFolder.open(tmp_path, writer="A", owner=object(), resumed_at=3)


# ---------------------------------------------------------------------- format versions


def test_every_file_has_a_format_version(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("run.json", "audit.json"):
        assert json.loads((tmp_path / name).read_text())[KEY] == VERSION
    assert {json.loads(line)[KEY] for line in lines(tmp_path / "events.jsonl")} == {VERSION}


def without_version(path: Path) -> None:
    rows = [json.loads(line) for line in lines(path)] if path.suffix == ".jsonl" else [json.loads(path.read_text())]
    path.write_text("".join(json.dumps({k: v for k, v in row.items() if k != KEY}) + "\n" for row in rows))


def test_files_without_a_version_are_read(tmp_path: Path) -> None:
    before = load(write_run(tmp_path), "run")
    for name in ("run.json", "audit.json", "events.jsonl"):
        without_version(tmp_path / name)
    assert load(tmp_path, "run") == before
    RunFolder.open(tmp_path, writer="A", owner=object(), resumed_at=3).close("A")


@pytest.mark.parametrize("name", ["run.json", "audit.json", "events.jsonl"])
def test_a_report_says_of_a_newer_file_that_it_is_newer(tmp_path: Path, name: str) -> None:
    path = write_run(tmp_path) / name
    path.write_bytes(path.read_bytes().replace(f'"{KEY}": {VERSION}'.encode(), f'"{KEY}": {VERSION + 1}'.encode()))
    (fault,) = load(tmp_path, "run").faults
    assert fault.startswith(f"{name} has format version {VERSION + 1}, and this lightning-mp")
    assert fault.endswith(f"reads up to {VERSION}: update lightning-mp")
    assert write_report(tmp_path).exists()


@pytest.mark.parametrize("resumed_at", [None, 3])
def test_a_run_does_not_write_into_the_folder_of_a_newer_package(tmp_path: Path, resumed_at: int | None) -> None:
    path = write_run(tmp_path) / "run.json"
    path.write_text(path.read_text().replace(f'"{KEY}": {VERSION}', f'"{KEY}": {VERSION + 1}'))
    content = {each: each.read_bytes() for each in tmp_path.iterdir()}
    with pytest.raises(PlanError, match=f"format version {VERSION + 1}.*Update lightning-mp"):
        RunFolder.open(tmp_path, writer="A", owner=object(), resumed_at=resumed_at)
    assert {each: each.read_bytes() for each in tmp_path.iterdir()} == content
