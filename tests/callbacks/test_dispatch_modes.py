"""The callbacks that watch operators leave none of their modes on torch's stack, however a batch ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lightning_mp.callbacks import PrecisionAudit, TrainingHealth
from support.models import Regression, batches
from support.running import trainer

WATCHING: dict[str, Callable[[Path], Any]] = {
    "health": lambda folder: TrainingHealth(folder, report=False),
    "audit": lambda folder: PrecisionAudit(run_dir=folder),
}
ORDERS = [order for count in (1, 2) for order in permutations(WATCHING, count)]


class LeftOut(Regression):
    """The first batch of the first epoch ends it."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.trainer.current_epoch == 0 else None


class Fails(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        raise KeyError(f"planned, at {loss}")


class FailsBackward(Regression):
    def on_after_backward(self) -> None:
        raise KeyError("planned")


@pytest.mark.parametrize("module", [LeftOut, Fails, FailsBackward, Regression])
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_no_mode_stays_behind(order: tuple[str, ...], module: Any, tmp_path: Path) -> None:
    runner = trainer(callbacks=[WATCHING[name](tmp_path) for name in order], max_epochs=2)
    with pytest.raises(KeyError, match="planned") if module in (Fails, FailsBackward) else nullcontext():
        runner.fit(module(), batches())
    assert not is_in_torch_dispatch_mode()
    assert not {"training_step", "backward"} & vars(runner.strategy).keys()
    counted = [callback for callback in runner.callbacks if isinstance(callback, TrainingHealth)]
    if counted and (module is Regression or module is LeftOut):
        assert len(counted[0].rows) == 8 * (2 if module is Regression else 1)


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_none_is_there_between_the_passes(order: tuple[str, ...], tmp_path: Path) -> None:
    found: list[bool] = []

    class Looks(Regression):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found.append(is_in_torch_dispatch_mode())

    trainer(callbacks=[WATCHING[name](tmp_path) for name in order]).fit(Looks(), batches())
    assert found == [False] * 8
