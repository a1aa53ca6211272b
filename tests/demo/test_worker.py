"""A process a mode: results come back, failures come back as a line, and nothing is left running."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from demo.tiny import SHAPE, corpus, job
from lightning_mp.demo.records import Failure, Reading, Result
from lightning_mp.demo.worker import Processes


@pytest.fixture(scope="module")
def processes() -> Processes:
    return Processes()


def test_readings_and_the_result_come_back(processes: Processes, tmp_path: Path) -> None:
    readings: list[Reading] = []
    result = processes.train(job("fp32", tmp_path), corpus(), readings.append)
    assert isinstance(result, Result)
    assert [reading.step for reading in readings] == [1, 2, 3, 4]
    assert result.compute_dtype == "float32"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


def test_an_error_comes_back_as_one_line_and_a_traceback(processes: Processes, tmp_path: Path) -> None:
    impossible = job("fp32", tmp_path, shape=replace(SHAPE, heads=3))
    outcome = processes.train(impossible, corpus(), lambda reading: None)
    assert isinstance(outcome, Failure)
    assert "\n" not in outcome.reason
    assert "Error" in outcome.reason
    assert "Traceback" in outcome.details


def test_a_process_that_is_killed_is_a_failure_and_not_a_hang(processes: Processes, tmp_path: Path) -> None:
    def kill(reading: Reading) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    outcome = processes.train(job("fp32", tmp_path, steps=500), corpus(), kill)
    assert isinstance(outcome, Failure)
    assert "-9" in outcome.reason


def test_an_interrupt_ends_the_process_and_is_passed_on(processes: Processes, tmp_path: Path) -> None:
    def interrupt(reading: Reading) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.train(job("fp32", tmp_path, steps=500), corpus(), interrupt)
    assert multiprocessing.active_children() == []
