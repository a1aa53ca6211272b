"""Reading a run's folder: what is whole is read, what is broken is named, and nothing in a file stops it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_mp.monitor.report.load import FILES, is_run, load
from lightning_mp.monitor.report.page import payload
from lightning_mp.monitor.run_folder import AUDIT, EVENTS, FINDINGS, METRICS, RUN
from monitor.report.runs import COLLAPSE, OVERFLOWS, SPIKE, metrics, values, write_run

FIRST_OF_TWO = f"{METRICS}: 1 of 2 lines cannot be read (line 1)"
SECOND_OF_THREE = f"{METRICS}: 1 of 3 lines cannot be read (line 2)"
WORDS = f"{METRICS}: 'a' holds values that are no numbers; they are left out"
NO_RUN = f"{RUN} is missing: status, machine, versions and plan are unknown"


def _with(folder: Path, name: str, content: bytes) -> list[str]:
    """What is said about a folder that holds this one file and a good ``run.json``."""
    (folder / RUN).write_text("{}")
    (folder / name).write_bytes(content)
    return load(folder, "run").faults


def test_a_whole_run_is_read_whole(tmp_path: Path) -> None:
    run = load(write_run(tmp_path), "run")
    assert run.faults == []
    assert set(run.series) == {name for row in metrics(tmp_path) for name in row} - {"step"}
    for name, series in run.series.items():
        assert series.values == values(tmp_path, name)
    assert run.series["val/loss"].steps == [10, 20, 30]
    assert run.series["train/loss"].gaps == len(OVERFLOWS)
    assert [event.step for event in run.events] == [*OVERFLOWS, SPIKE, COLLAPSE]
    assert [event.step for event in run.alerts] == [SPIKE, COLLAPSE]
    assert run.about["status"] == "finished"
    assert run.audit is not None
    assert len(run.audit["rows"]) == 2
    assert run.findings is not None
    assert run.findings[0]["code"] == "LMP007"
    assert run.last_step == 30


@pytest.mark.parametrize(
    ("content", "fault", "readings"),
    [
        (b'{"step":1,"a":1}\n{"step":2,"a":', f"{METRICS}: its last line, 2, is cut off", [1.0]),
        (b'{"step":1,"a":1}\n{"step":2,"a":2}', None, [1.0, 2.0]),
        (b'{"step":1,"a":1}\nnoise\n{"step":3,"a":3}\n', SECOND_OF_THREE, [1.0, 3.0]),
        (b'[1]\n{"step":2,"a":2}\n', FIRST_OF_TWO, [2.0]),
        (b'{"a":1}\n{"step":2,"a":2}\n', FIRST_OF_TWO, [2.0]),
        (b'{"step":"x","a":1}\n{"step":2,"a":2}\n', FIRST_OF_TWO, [2.0]),
        (b'{"step":1.5,"a":1}\n{"step":2,"a":2}\n', FIRST_OF_TWO, [2.0]),
        (b'{"step":true,"a":1}\n{"step":2,"a":2}\n', FIRST_OF_TWO, [2.0]),
        (b'\xff\xfe\n{"step":2,"a":2}\n', FIRST_OF_TWO, [2.0]),
        (b"x\n" * 9 + b'{"step":2,"a":2}\n', f"{METRICS}: 9 of 10 lines cannot be read (line 1, 2, 3, 4, 5, …)", [2.0]),
        (b'{"step":1,"a":"one"}\n{"step":2,"a":2}\n', WORDS, [2.0]),
        (b'{"step":1,"a":null}\n{"step":2,"a":2}\n', None, [None, 2.0]),
        (b'{"step":1,"a":NaN}\n{"step":2,"a":1e999}\n', None, [None, None]),
        (b'{"step":1,"a":1' + b"0" * 400 + b"}\n", None, [None]),
        (b"[" * 100_000, f"{METRICS}: its last line, 1, is cut off", None),
        (b"", f"{METRICS} holds no reading yet", None),
        (b"\n\n", f"{METRICS} holds no reading yet", None),
    ],
)  # fmt: skip
def test_a_broken_metrics_file_costs_its_broken_lines_and_says_so(
    tmp_path: Path, content: bytes, fault: str | None, readings: list[float | None] | None
) -> None:
    assert _with(tmp_path, METRICS, content) == ([fault] if fault else [])
    series = load(tmp_path, "run").series.get("a")
    assert (series and series.values) == readings


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    assert load(tmp_path, "run").faults == [f"{METRICS} is missing", NO_RUN]


def test_a_folder_in_a_files_place_is_named(tmp_path: Path) -> None:
    for name in (METRICS, RUN):
        (tmp_path / name).mkdir()
    assert load(tmp_path, "run").faults == [f"{name} cannot be read: Is a directory" for name in (METRICS, RUN)]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (RUN, b"{", "is cut off or no JSON"),
        (RUN, b"[1, 2]", "holds no JSON object"),
        (RUN, b"\xff", "is cut off or no JSON"),
        (RUN, b"[" * 100_000 + b"]" * 100_000, "is cut off or no JSON"),
        (AUDIT, b"3", "holds no JSON object"),
        (AUDIT, b'{"rows": [1, {"module": "a"}]}', "some of its rows cannot be read"),
        (AUDIT, b"{}", "some of its rows cannot be read"),
        (FINDINGS, b'"x"', "some of its rows cannot be read"),
        (EVENTS, b'{"step": 1, "kind": "loss_plateau"}\n{"kind": "x"}\n', "1 of 2 lines cannot be read (line 2)"),
    ],
)
def test_any_other_broken_file_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_bytes(content)
    run = load(tmp_path, "run")
    (fault,) = run.faults
    assert fault.startswith(name)
    assert says in fault
    assert len(run.series["train/loss"].steps) == 30


def test_an_event_with_values_of_wrong_types_is_shown_with_what_can_be_read(tmp_path: Path) -> None:
    row = {"step": 3, "kind": 7, "severity": "dire", "rank": "0", "module": ["a"], "value": 10**400, "evidence": 5}
    assert _with(tmp_path, EVENTS, json.dumps(row).encode() + b"\n") == [f"{METRICS} is missing"]
    (event,) = load(tmp_path, "run").events
    assert (event.step, event.kind, event.severity, event.rank) == (3, "7", "warning", None)
    assert (event.module, event.value, event.evidence) == ('["a"]', None, {})


@pytest.mark.parametrize("name", FILES)
def test_a_folder_with_any_of_its_files_is_a_run(tmp_path: Path, name: str) -> None:
    assert not is_run(tmp_path)
    (tmp_path / name).write_text("")
    assert is_run(tmp_path)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_names = st.sampled_from(["train/loss", "health/loss_scale", "health/mfu", "health/lr/x", "a/b/c"]) | st.text(
    max_size=6
)
_readings = st.dictionaries(_names, st.floats() | _json, max_size=4).flatmap(
    lambda row: (st.integers() | _json).map(lambda step: {"step": step, **row})
)
_events = st.fixed_dictionaries(
    {"step": st.integers(-5, 5) | _json, "kind": _json},
    optional=dict.fromkeys(("severity", "rank", "module", "parameter", "value", "evidence", "cause", "action"), _json),
)
_about = st.dictionaries(st.sampled_from(["status", "error", "machine", "versions", "plan", "at"]), _json)
_audit = st.lists(st.dictionaries(st.sampled_from(["module", "declared", "ok"]), _json), max_size=2)


def _lines(rows: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Files of lines, some of which are broken."""
    line = st.one_of(rows.map(_dumped), rows.map(_dumped), st.binary(max_size=20))
    return st.lists(line, max_size=6).map(b"\n".join)


def _dumped(found: Any) -> bytes:
    return json.dumps(found).encode()


_files = {
    METRICS: _lines(_readings),
    EVENTS: _lines(_events),
    RUN: st.one_of(_about.map(_dumped), _json.map(_dumped), st.binary(max_size=30)),
    AUDIT: st.one_of(_audit.map(lambda rows: _dumped({"rows": rows})), _json.map(_dumped)),
    FINDINGS: st.one_of(st.lists(_json, max_size=2).map(_dumped), _json.map(_dumped)),
}


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(files=st.fixed_dictionaries({}, optional=_files))
def test_whatever_the_files_hold_there_is_a_report(tmp_path: Path, files: dict[str, bytes]) -> None:
    for name in FILES:
        (tmp_path / name).unlink(missing_ok=True)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    one, other = load(tmp_path, "one"), load(tmp_path, "other")
    content: dict[str, Any] = payload([one])
    json.dumps(content, allow_nan=False)
    json.dumps(payload([one, other]), allow_nan=False)
    if METRICS not in files:
        assert f"{METRICS} is missing" in content["sections"]["faults"]
