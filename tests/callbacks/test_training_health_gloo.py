"""TrainingHealth in two processes: whatever is sharded, the numbers are those of one process that had all batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_mp.monitor import metric_names
from support import health
from support.gloo import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

EXACT = [(host, "32-true") for host in health.HOSTS]
SCALED = [(host, "16-mixed") for host in ("ddp", "fsdp2", "fsdp1", "deepspeed_zero2", "deepspeed_zero3")]


#: (strategy, mode, what is done about it)
BAD = [
    ("stock ddp", "32-true", "log"),
    ("stock ddp", "32-true", "skip"),
    ("stock ddp", "bf16-mixed", "stop"),
    ("ddp", "16-mixed", "log"),
    ("fsdp2", "32-true", "log"),
    ("fsdp2", "32-true", "skip"),
    ("fsdp1", "bf16-mixed", "stop"),
    ("deepspeed_zero2", "32-true", "log"),
    ("deepspeed_zero3", "32-true", "stop"),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: Any) -> dict[tuple[str, str], list[Any]]:
    """Per run, what each rank's monitors have: one pair of processes makes all runs."""
    runs = EXACT + SCALED
    ranks = run_ranks(health.all_watched, runs, str(tmp_path_factory.mktemp("runs")), timeout=280)
    return {run: [rank[number] for rank in ranks] for number, run in enumerate(runs)}


@pytest.mark.parametrize(("host", "mode"), EXACT + SCALED)
def test_the_numbers_are_those_of_one_process(host: str, mode: str, rows: dict[Any, Any]) -> None:
    tolerance = 1e-4 if mode == "32-true" else 2e-2
    mine, _ = rows[host, mode][0]
    for row, expected in zip(mine, health.oracle(), strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(("host", "mode"), EXACT + SCALED)
def test_every_rank_reads_the_same(host: str, mode: str, rows: dict[Any, Any]) -> None:
    first, second = (rank[0] for rank in rows[host, mode])
    assert first == second


@pytest.mark.parametrize(("host", "mode"), SCALED)
def test_the_scale_is_read_wherever_it_is_kept(host: str, mode: str, rows: dict[Any, Any]) -> None:
    mine, scale = rows[host, mode][0]
    assert [row[metric_names.LOSS_SCALE] for row in mine] == [64.0] * health.STEPS
    assert [row[metric_names.LOSS_SCALE] for row in scale] == [64.0] * health.STEPS
    assert [row[metric_names.SKIPPED_STEPS] for row in scale] == [0.0] * health.STEPS


@pytest.fixture(scope="module")
def bad(tmp_path_factory: Any) -> dict[tuple[str, str, str], list[Any]]:
    ranks = run_ranks(health.all_bad, BAD, str(tmp_path_factory.mktemp("bad")), timeout=280)
    return {run: [rank[number] for rank in ranks] for number, run in enumerate(BAD)}


@pytest.mark.parametrize("run", BAD, ids=" ".join)
def test_the_rank_whose_own_batch_was_bad_is_named_and_all_do_the_same(run: tuple[str, str, str], bad: Any) -> None:
    first, second = bad[run]
    assert first == second
    event = next(event for event in first["events"] if event["severity"] != "info")
    assert (event["step"], event["kind"], event["rank"]) == (2, "nonfinite_loss", 1)
    assert (event["module"], event["action"]) == ("net.0", run[2])
    assert first["rows"] == (3 if run[2] == "stop" else health.STEPS)
    kept_back = run[2] == "skip" or not run[0].startswith("stock")
    assert first["finite"] is kept_back


def test_work_is_added_over_ranks_and_the_slowest_sets_the_time() -> None:
    for found in run_ranks(health.totals):
        assert (found[metric_names.SAMPLES_PER_S], found[metric_names.TOKENS_PER_S]) == ((8 + 9) / 2.0, 300 / 2.0)
        assert found["flops_per_s"] == 6e9 / 2.0  # a device
        assert found[metric_names.LOSS] is None


def test_a_step_under_zero_cannot_be_left_out(tmp_path: Path) -> None:
    for said in run_ranks(health.refused, str(tmp_path)):
        assert "'skip' under DeepSpeed" in said
