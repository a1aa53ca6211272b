"""Reading a run's folder: what is whole is read, what is damaged is named, and nothing in a file stops it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_mp.monitor.report.load import FILES, is_run, load
from lightning_mp.monitor.report.page import render
from lightning_mp.monitor.run_folder import AUDIT, EVENTS, FINDINGS, METRICS, RUN
from monitor.report.runs import COLLAPSE, OVERFLOWS, SPIKE, metrics, values, write_run

DAMAGED = f"{METRICS} is damaged: "


def test_a_whole_run_is_read_whole(tmp_path: Path) -> None:
    run = load(write_run(tmp_path), "run")
    assert run.faults == []
    assert set(run.series) == {name for row in metrics(tmp_path) for name in row} - {"step"}
    for name, series in run.series.items():
        assert series.values == values(tmp_path, name)
    assert run.series["val/loss"].steps == [10, 20, 30]
    assert [event.step for event in run.events] == [*OVERFLOWS, SPIKE, COLLAPSE]
    assert [event.step for event in run.alerts] == [SPIKE, COLLAPSE]
    assert run.about["status"] == "finished"
    assert run.audit is not None
    assert len(run.audit) == 2
    assert run.findings is not None
    assert run.findings[0]["code"] == "LMP007"
    assert run.last_step == 30


@pytest.mark.parametrize(
    ("content", "fault", "readings"),
    [
        (b'{"step":1,"a":1}\n{"step":2,"a":', f"{DAMAGED}1 of 2 lines cannot be read", [1.0]),
        (b'{"step":1,"a":1}\n{"step":2,"a":2}', None, [1.0, 2.0]),
        (b'{"step":1,"a":1}\nnoise\n{"step":3,"a":3}\n', f"{DAMAGED}1 of 3 lines cannot be read", [1.0, 3.0]),
        (b'\xff\xfe\n{"a":1}\n{"step":2,"a":2}\n', f"{DAMAGED}2 of 3 lines cannot be read", [2.0]),
        (b'{"step":1,"a":"one"}\n{"step":2,"a":2}\n', f"{DAMAGED}1 of 2 lines cannot be read", [2.0]),
        (b'{"step":1,"a":null}\n{"step":2,"a":2}\n', None, [None, 2.0]),
        (b'{"step":1,"a":NaN}\n{"step":2,"a":1e999}\n', None, [None, None]),
        (b"\n\n", f"{METRICS} holds no reading yet", None),
    ],
)  # fmt: skip
def test_a_damaged_metrics_file_costs_its_damaged_lines_and_says_so(
    tmp_path: Path, content: bytes, fault: str | None, readings: list[float | None] | None
) -> None:
    (tmp_path / RUN).write_text("{}")
    (tmp_path / METRICS).write_bytes(content)
    run = load(tmp_path, "run")
    assert run.faults == ([fault] if fault else [])
    assert (run.series["a"].values if "a" in run.series else None) == readings
    assert fault is None or fault in render([run])


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    no_run = f"{RUN} is missing: status, machine, versions and plan are unknown"
    assert load(tmp_path, "run").faults == [f"{METRICS} is missing", no_run]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (RUN, b"{", "is damaged and left out"),
        (RUN, b"[1, 2]", "is damaged and left out"),
        (AUDIT, b"3", "is damaged and left out"),
        (AUDIT, b'{"rows": [1, {"module": "a"}]}', "is damaged and left out"),
        (FINDINGS, b'"x"', "is damaged and left out"),
        (EVENTS, b'{"step": 1, "kind": "loss_plateau", "severity": "info"}\n{"kind', "is damaged: 1 of 2 lines"),
    ],
)
def test_any_other_damaged_file_is_named_and_the_rest_is_shown(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_bytes(content)
    run = load(tmp_path, "run")
    (fault,) = run.faults
    assert fault.startswith(f"{name} {says}")
    assert len(run.series["train/loss"].steps) == 30
    assert fault in render([run])


@pytest.mark.parametrize("name", FILES)
def test_a_folder_with_any_of_its_files_is_a_run(tmp_path: Path, name: str) -> None:
    assert not is_run(tmp_path)
    (tmp_path / name).write_text("")
    assert is_run(tmp_path)
