"""What a Trainer does beside fitting: validate, test, save and go on, by the registered name, without the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_mp import MixedPrecisionPlan, PlanError
from support.comparing import furthest
from support.pipeline import ROWS, Staged, data
from support.ranks import Ranks
from support.running import trainer

pytestmark = pytest.mark.gloo

PRECISION = "bf16-mixed"


class NoSteps(Staged):
    """What only runs in stages needs no steps."""

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


@dataclass(frozen=True)
class Afterwards:
    """A fit, then every other entry of the same Trainer, then another Trainer with the checkpoint."""

    path: str

    def run(self) -> dict[str, Any]:
        module, runner = NoSteps(), _trainer()
        runner.fit(module, data(2, ROWS), data(2, ROWS))
        found: dict[str, Any] = {"fit": float(runner.callback_metrics["val_loss"])}
        runner.save_checkpoint(self.path)
        found["validate"] = runner.validate(module, data(2, ROWS), verbose=False)[0]["val_loss"]
        found["test"] = runner.test(module, data(2, ROWS), verbose=False)[0]["test_loss"]
        weights = runner.strategy.lightning_module_state_dict()
        other = _trainer()
        found["loaded"] = other.validate(NoSteps(), data(2, ROWS), ckpt_path=self.path, verbose=False)[0]["val_loss"]
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
    results = ranks.run(Afterwards(str(tmp_path / "staged.ckpt")))
    for found in results:
        assert found["fit"] == found["validate"] == found["test"] == found["loaded"]
        assert found["kept"] == 0.0
        assert "those of another pipeline stage" in found["called"]
        assert "on the ranks of an earlier run" in found["again"]
        assert not found["left"]
        assert "trainer.predict under pipeline parallelism" in found["predict"]
        assert "multiple optimizers is only supported with manual optimization" in found["several"]
