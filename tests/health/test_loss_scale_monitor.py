"""LossScaleMonitor beside every keeper of a scale: what it logs is what the keeper says after each step."""

import logging
import math
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar

from lightning_mp import LossScaling
from lightning_mp.callbacks import LossScaleMonitor
from lightning_mp.record import metric_names
from support.models import Regression
from support.oracles import UNSCALED, plan_for, stock_for
from support.running import fit

OVERFLOWS = (2, 3, 5)
#: skips after each of 8 steps
SKIPS = [0, 0, 1, 2, 2, 3, 3, 3]
RULE = {"init_scale": 16.0, "growth_interval": 2}
KEEPERS: dict[str, Any] = {
    "plan": lambda: {"plugins": [plan_for("16-mixed", LossScaling(**RULE))]},
    "plan, hysteresis": lambda: {"plugins": [plan_for("16-mixed", LossScaling(**RULE, hysteresis=2))]},
    "stock": lambda: stock_for("16-mixed", **RULE),
    # its growth undoes every backoff at once
    "stock, growing": lambda: stock_for("16-mixed", init_scale=16.0, growth_interval=1),
}
OPTIMIZERS = {
    "fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4, fused=True),
    "plain": partial(torch.optim.AdamW, lr=1e-2, eps=1e-4),
}
keepers = pytest.mark.parametrize("keeper", KEEPERS)


class Asks(Callback):
    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.states.append(trainer.precision_plugin.scaler.state_dict())


def watched(keeper: str, module: Any = None, **options: Any) -> tuple[LossScaleMonitor, Asks]:
    monitor, asks = LossScaleMonitor(options.pop("every", 1)), Asks()
    module = module or Regression(OPTIMIZERS["fused"], overflow_at=OVERFLOWS)
    fit(module, callbacks=[monitor, asks], **KEEPERS[keeper](), **options)
    return monitor, asks


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@keepers
def test_every_value_is_the_keepers(keeper: str, optimizer: str) -> None:
    monitor, asks = watched(keeper, Regression(OPTIMIZERS[optimizer], overflow_at=OVERFLOWS))
    assert [row[metric_names.STEP] for row in monitor.rows] == list(range(8))
    for row, state, skips in zip(monitor.rows, asks.states, SKIPS, strict=True):
        assert row[metric_names.LOSS_SCALE] == state["scale"]
        assert row[metric_names.SKIPPED_STEPS] == skips


@pytest.mark.parametrize("mode", UNSCALED)
@pytest.mark.parametrize("of", ["stock", "plan"])
def test_without_a_scale_it_says_so_once_and_logs_nothing(of: str, mode: str, caplog: Any) -> None:
    monitor, module = LossScaleMonitor(), Regression()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            fit(module, callbacks=[monitor], **(stock_for(mode) if of == "stock" else {"plugins": [plan_for(mode)]}))
    assert sum("LossScaleMonitor" in message for message in caplog.messages) == 1
    assert monitor.rows == []


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_the_progress_bar_shows_scale_and_skips_in_short(bar: Any, capsys: Any) -> None:
    shown: list[dict[str, Any]] = []

    class Sees(bar):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            shown.append(self.get_metrics(trainer, pl_module))
            super().on_train_batch_end(trainer, pl_module, *rest)

    mine = Sees(refresh_rate=1)
    monitor = LossScaleMonitor()
    fit(Regression(), callbacks=[monitor, mine], enable_progress_bar=True, **stock_for("16-mixed"))
    assert [(items["scale"], items["skipped"]) for items in shown] == [
        (f"2^{math.log2(row[metric_names.LOSS_SCALE]):.0f}", f"{row[metric_names.SKIPPED_STEPS]:.0f}")
        for row in monitor.rows
    ]
    assert not any("health/" in name for items in shown for name in items)
    assert "get_metrics" not in vars(mine)
    if bar is TQDMProgressBar:
        assert f"scale={shown[-1]['scale']},skipped={shown[-1]['skipped']}" in "".join(capsys.readouterr().out.split())
