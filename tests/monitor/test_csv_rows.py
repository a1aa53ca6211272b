"""Lightning's CSV file has one row a step, with what the module logs and what the monitors log."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_mp.callbacks import LossScaleMonitor, TrainingHealth
from support.models import Regression, batches
from support.oracles import plan_for
from support.running import fit


class Logs(Regression):
    """Logs as users do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("mine", loss)
        return loss


def _rows(logger: CSVLogger) -> list[dict[str, str]]:
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("flush", [1, 100])
def test_each_step_has_one_row_with_everything(tmp_path: Path, every: int, flush: int) -> None:
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=flush)
    monitors = [TrainingHealth(run_dir=tmp_path, every_n_steps=every), LossScaleMonitor(every)]
    fit(Logs(), plugins=[plan_for("16-mixed")], logger=logger, callbacks=monitors, log_every_n_steps=1)
    rows = _rows(logger)
    assert Counter(row["step"] for row in rows) == {str(step): 1 for step in range(8)}
    for row in rows:
        assert row["mine"]
        for name in ("health/grad_norm", "health/loss_scale"):
            assert bool(row[name]) == (int(row["step"]) % every == 0)


def test_where_lightning_logs_rarely_every_reading_is_written(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(
        Logs(),
        data=batches(8 * 250),
        plugins=[plan_for("32-true")],
        logger=logger,
        callbacks=[TrainingHealth(run_dir=tmp_path)],
    )
    rows = _rows(logger)
    assert [int(row["step"]) for row in rows] == list(range(250))
    assert all(row["health/grad_norm"] for row in rows)
