"""A fit begins with the plan in a few lines, and in the hyperparameters of every logger."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger

from lightning_mp import MixedPrecisionPlan
from support.models import Regression
from support.running import fit

PLAN = {"pins": {"net.1": "fp32"}, "tf32": True}


def test_the_loggers_have_the_plan_under_one_key(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name="one"), CSVLogger(tmp_path, name="two")]
    plan = MixedPrecisionPlan("16-mixed", **PLAN)
    fit(Regression(), plugins=[plan], max_steps=1, logger=loggers)
    for logger in loggers:
        written = yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())
        assert list(written) == ["precision_plan"]
        assert written["precision_plan"] == plan.policy.to_dict() | {"pins": "{'net.1': 'fp32'}"}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "auto"])
def test_all_that_a_plan_prints_at_the_start_is_three_to_eight_lines(
    precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    def lines(*plugins: MixedPrecisionPlan) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            fit(Regression(), plugins=list(plugins), max_steps=1, logger=False)
        return [line for record in caplog.records for line in record.getMessage().splitlines()]

    stock = lines()
    added = [line for line in lines(MixedPrecisionPlan(precision, **PLAN)) if line not in stock]
    assert 3 <= len(added) <= 8
    assert all(len(line) <= 160 for line in added)
    assert sum(line.startswith("MixedPrecisionPlan(") for line in added) == 1
