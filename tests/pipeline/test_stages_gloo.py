"""What a Trainer does beside fitting: validate, test, save and go on, by the registered name, without the steps."""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch.utils.data import DataLoader

from lightning_mp import MixedPrecisionPlan, NonFiniteError, PlanError, make_strategy
from lightning_mp.callbacks import PrecisionAudit, TrainingHealth
from lightning_mp.pipeline.schedules import WatchedStage
from support.comparing import furthest
from support.pipeline import ROWS, WIDTH, Llama, Staged, data
from support.ranks import Ranks
from support.running import trainer

pytestmark = pytest.mark.gloo
PRECISION = "bf16-mixed"


class NoSteps(Staged):
    training_step = LightningModule.training_step
    validation_step = LightningModule.validation_step


def _trainer(**arguments: Any) -> Any:
    quiet = {"num_sanity_val_steps": 0, "max_epochs": 1, **arguments}
    return trainer(plugins=[MixedPrecisionPlan(PRECISION)], strategy="mp_pipeline", devices=2, **quiet)


class TwoOptimizers(NoSteps):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (self.blocks, self.head)]


def _predict() -> None:
    _trainer().predict(NoSteps(), data(1, ROWS))


def _several() -> None:
    _trainer().fit(TwoOptimizers(), data(1, ROWS))


def _said(ask: Callable[[], None]) -> str:
    with pytest.raises((PlanError, RuntimeError)) as raised:
        ask()
    return str(raised.value)


LENGTHS = 12


def lengths() -> DataLoader[Any]:
    """Batches of which no two have the same rows."""
    torch.manual_seed(3)
    batches = [(torch.randn(rows, WIDTH), torch.randn(rows, 1)) for rows in range(1, LENGTHS + 1)]
    return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]


def _validated(weights: Any) -> float:
    """The loss of the whole model on :func:`lengths`, in this process alone."""
    whole, total, rows = Staged(), 0.0, 0
    whole.load_state_dict(weights)
    for inputs, target in lengths():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            total += float(whole.pipeline_loss(whole(inputs), target)) * len(inputs)
        rows += len(inputs)
    return total / rows


class CountsSchedules(Callback):
    """How many stages of torch's schedules live, after every batch of an evaluation."""

    def __init__(self) -> None:
        self.most = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        gc.collect()
        self.most = max(self.most, sum(isinstance(one, WatchedStage) for one in gc.get_objects()))


def afterwards(path: str) -> dict[str, Any]:
    module, counts = NoSteps(), CountsSchedules()
    runner = _trainer(callbacks=[counts])
    runner.fit(module, data(2, ROWS), data(2, ROWS))
    found: dict[str, Any] = {"fit": float(runner.callback_metrics["val_loss"])}
    runner.save_checkpoint(path)
    found["validate"] = runner.validate(module, data(2, ROWS), verbose=False)[0]["val_loss"]
    found["test"] = runner.test(module, data(2, ROWS), verbose=False)[0]["test_loss"]
    found["lengths"] = runner.validate(module, lengths(), verbose=False)[0]["val_loss"]
    found["schedules"] = counts.most
    weights = runner.strategy.lightning_module_state_dict()
    found["whole"] = _validated(torch.load(path, weights_only=True)["state_dict"])
    other = _trainer()
    found["loaded"] = other.validate(NoSteps(), data(2, ROWS), ckpt_path=path, verbose=False)[0]["val_loss"]
    found["kept"] = furthest(weights, other.strategy.lightning_module_state_dict())
    try:
        module(data(1, ROWS).dataset[0][0])
    except RuntimeError as error:
        found["called"] = str(error)
    try:
        _trainer().fit(module, data(1, ROWS))
    except ValueError as error:
        found["again"] = str(error)
    found |= {"predict": _said(_predict), "several": _said(_several)}
    found["left"] = "training_step" in vars(module)
    return found


def test_a_module_without_steps_is_fitted_validated_tested_and_loaded(tmp_path: Any, ranks: Ranks) -> None:
    results = ranks.call(afterwards, str(tmp_path / "staged.ckpt"))
    for found in results:
        assert found["fit"] == found["validate"] == found["test"] == found["loaded"]
        assert found["kept"] == 0.0
        assert found["lengths"] == pytest.approx(found["whole"], rel=1e-5)
        assert found["schedules"] <= 8 < LENGTHS
        assert "those of another pipeline stage" in found["called"]
        assert "on the ranks of an earlier run" in found["again"]
        assert not found["left"]
        assert "trainer.predict under pipeline parallelism" in found["predict"]
        assert "multiple optimizers is only supported with manual optimization" in found["several"]


SERIES = ("train/loss", "health/grad_norm", "health/param_norm", "health/update_ratio")
BAD = {1: "blocks.1.up.weight"}


def _fit(module: Staged, plan: MixedPrecisionPlan, loader: Any, **arguments: Any) -> None:
    quiet = {"num_sanity_val_steps": 0, "use_distributed_sampler": False, "gradient_clip_val": 0.5}
    trainer(plugins=[plan], **quiet, **arguments).fit(module, loader, data(1, ROWS))


def _read(folder: str) -> list[list[float]]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in SERIES] for line in lines if SERIES[0] in line]


def watched(folder: str) -> tuple[Any, Any, tuple[Any, ...]]:
    audit = PrecisionAudit(run_dir=f"{folder} audit")
    plan = MixedPrecisionPlan("bf16-mixed", pins={"lm_head": "fp32"})
    callbacks, staged = [TrainingHealth(folder), audit], make_strategy("pipeline", plan, microbatches=4)
    _fit(Llama(), plan, data(3, ROWS), callbacks=callbacks, devices=2, strategy=staged)
    found: tuple[Any, ...] = ()
    plan = MixedPrecisionPlan("bf16-mixed", nonfinite="raise")
    try:
        staged = make_strategy("pipeline", plan, microbatches=4)
        _fit(Staged(BAD), plan, data(3, ROWS), devices=2, strategy=staged)
    except NonFiniteError as error:
        found = error.step, error.rank, error.parameter
    rows = {row.module: (row.compute, row.ok) for row in audit.rows}
    return _read(folder) if os.environ["RANK"] == "0" else None, rows, found


def test_series_rows_and_errors_are_those_of_the_whole_model(tmp_path: Path, ranks: Ranks) -> None:
    (series, rows, found), (_, others, also) = ranks.call(watched, str(tmp_path / "staged"))
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
