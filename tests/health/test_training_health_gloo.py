"""TrainingHealth in two processes: whatever is sharded, the numbers are those of one process that had all batches."""

from pathlib import Path

import pytest

from lightning_mp.record import metric_names
from support import health
from support.comparing import of_sums
from support.health import STEPS
from support.ranks import Ranks

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
EXACT = [(host, "32-true") for host in health.HOSTS]
SCALED = [(host, "16-mixed") for host in ("ddp", "fsdp2", "deepspeed_zero2")]
#: (strategy, mode, what is done about it)
BAD = [
    ("stock ddp", "32-true", "stop"), ("ddp", "16-mixed", "log"), ("fsdp2", "32-true", "log"),
    ("deepspeed_zero2", "32-true", "log"), ("deepspeed_zero3", "32-true", "stop"),
]  # fmt: skip


@pytest.mark.parametrize(("host", "mode"), EXACT + SCALED)
def test_every_rank_reads_the_numbers_of_one_process(ranks: Ranks, folder: Path, host: str, mode: str) -> None:
    (mine, scale), other = ranks.call(health.watched, host, mode, folder / f"{host}-{mode}")
    assert (mine, scale) == tuple(other)
    # losses and norms of all steps, of products of FEATURES numbers that were rounded to fp16 once each way
    tolerance = of_sums(64) * STEPS if mode == "32-true" else of_sums(2, mode) * STEPS
    for row, expected in zip(mine, health.oracle(), strict=True):
        assert {name: row[name] for name in expected} == pytest.approx(expected, rel=tolerance)
    if mode == "16-mixed":  # wherever the scale is kept
        for rows in (mine, scale):
            assert [row[metric_names.LOSS_SCALE] for row in rows] == [64.0] * STEPS
            assert [row[metric_names.SKIPPED_STEPS] for row in rows] == [0.0] * STEPS


@pytest.mark.parametrize("run", BAD, ids=" ".join)
def test_the_rank_of_a_bad_batch_is_named_and_all_do_the_same(
    ranks: Ranks, tmp_path: Path, run: tuple[str, str, str]
) -> None:
    first, second = ranks.call(health.bad_batch, *run, tmp_path)
    assert first == second
    event = next(event for event in first["events"] if event["severity"] != "info")
    assert (event["step"], event["kind"], event["rank"]) == (2, "nonfinite_loss", 1)
    assert (event["module"], event["action"]) == ("net.0", run[2])
    assert first["rows"] == (3 if run[2] == "stop" else STEPS)
    assert first["finite"] is not run[0].startswith("stock")


def test_work_is_added_over_ranks_and_the_slowest_sets_the_time(ranks: Ranks) -> None:
    for found in ranks.call(health.totals):
        assert (found[metric_names.SAMPLES_PER_S], found[metric_names.TOKENS_PER_S]) == ((8 + 9) / 2.0, 300 / 2.0)
        assert found["flops_per_s"] == 6e9 / 2.0  # a device
        assert found[metric_names.LOSS] is None
