"""What watches a run sees every stage: health's series, the audit's rows, and the search for what is not finite."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lightning_mp import MixedPrecisionPlan, NonFiniteError, make_strategy
from lightning_mp.callbacks import PrecisionAudit, TrainingHealth
from support.pipeline import ROWS, Llama, Staged, data
from support.ranks import Ranks
from support.running import trainer

pytestmark = pytest.mark.gloo

SERIES = ("train/loss", "health/grad_norm", "health/param_norm", "health/update_ratio")
BAD = {1: "blocks.1.up.weight"}


def _fit(module: Staged, plan: MixedPrecisionPlan, loader: Any, **arguments: Any) -> None:
    quiet = {"num_sanity_val_steps": 0, "use_distributed_sampler": False, "gradient_clip_val": 0.5}
    trainer(plugins=[plan], **quiet, **arguments).fit(module, loader, data(1, ROWS))


def _read(folder: str) -> list[list[float]]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in SERIES] for line in lines if SERIES[0] in line]


@dataclass(frozen=True)
class Watched:
    """A fit under the callbacks, and one that ends on a bad gradient of the first stage."""

    folder: str

    def run(self) -> tuple[Any, Any, tuple[Any, ...]]:
        audit = PrecisionAudit(run_dir=f"{self.folder} audit")
        plan = MixedPrecisionPlan("bf16-mixed", pins={"lm_head": "fp32"})
        callbacks, staged = [TrainingHealth(self.folder), audit], make_strategy("pipeline", plan, microbatches=4)
        _fit(Llama(), plan, data(3, ROWS), callbacks=callbacks, devices=2, strategy=staged)
        found: tuple[Any, ...] = ()
        plan = MixedPrecisionPlan("bf16-mixed", nonfinite="raise")
        try:
            staged = make_strategy("pipeline", plan, microbatches=4)
            _fit(Staged(BAD), plan, data(3, ROWS), devices=2, strategy=staged)
        except NonFiniteError as error:
            found = error.step, error.rank, error.parameter
        rows = {row.module: (row.compute, row.ok) for row in audit.rows}
        return _read(self.folder) if os.environ["RANK"] == "0" else None, rows, found


def test_series_rows_and_errors_are_those_of_the_whole_model(tmp_path: Path, ranks: Ranks) -> None:
    (series, rows, found), (_, others, also) = ranks.run(Watched(str(tmp_path / "staged")))
    plan = MixedPrecisionPlan("bf16-mixed", pins={"lm_head": "fp32"})
    alone = TrainingHealth(str(tmp_path / "alone"))
    _fit(Llama(), plan, data(3, ROWS // 4), callbacks=[alone], accumulate_grad_batches=4)
    for staged, expected in zip(series, _read(str(tmp_path / "alone")), strict=True):
        assert staged == pytest.approx(expected, rel=1e-4)
    assert rows == others
    assert all(ok for _, ok in rows.values())
    assert {rows[f"model.model.layers.{layer}.mlp.up_proj"][0] for layer in range(4)} == {"bf16"}
    assert rows["model.lm_head"][0] == "fp32"
    assert found == also == (1, 0, "blocks.1.up.weight")
