"""torchao's optimizers, which keep their state in tensors of their own: skips and resumes are exact."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.models import FEATURES, Regression, same_weights, weights
from support.oracles import plan_for, stock_for
from support.running import fit
from support.saving import ResumableBatches, SaveAt

optim = pytest.importorskip("torchao.optim")

AT, BAD = 5, (2, 7)


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


class Wide(Regression):
    """A weight of 4096 numbers, where torchao begins to quantize; random numbers that depend on the step alone."""

    def __init__(self, name: str, bad: tuple[int, ...] = BAD, **options: Any) -> None:
        super().__init__(partial(getattr(optim, name), lr=1e-2, eps=1e-4, **options), None, bad)
        torch.manual_seed(0)
        wide = 4096 // FEATURES
        self.net = nn.Sequential(nn.Linear(FEATURES, wide), nn.LayerNorm(wide), nn.ReLU(), nn.Linear(wide, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        torch.manual_seed(self.trainer.global_step)
        return super().training_step(batch, batch_idx)

    def state(self) -> list[dict[str, Any]]:
        """Of every parameter."""
        return [dict(value) for value in self.trainer.optimizers[0].state.values()]


CASES = {
    "8 bits": ("AdamW8bit", "16-mixed", {}),
    "4 bits": ("AdamW4bit", "bf16-mixed", {}),
    "fp8": ("AdamWFp8", "16-mixed", {}),
    "stochastic": ("AdamW8bit", "bf16-true", {"bf16_stochastic_round": True}),
}


def _numbers(state: list[dict[str, Any]]) -> list[Tensor]:
    values = [value for each in state for value in each.values()]
    return [value.dequantize() if hasattr(value, "dequantize") else value for value in values]


@pytest.mark.parametrize("case", CASES)
def test_the_continuation_is_the_uninterrupted_run(case: str, tmp_path: Path) -> None:
    name, mode, options = CASES[case]
    whole, resumed, plan = Wide(name, **options), Wide(name, **options), plan_for(mode)
    saves = [SaveAt(tmp_path, AT)]
    fit(whole, plugins=[plan_for(mode)], data=ResumableBatches(), max_epochs=2, callbacks=saves)
    path = tmp_path / f"{AT}.ckpt"
    fit(resumed, plugins=[plan], data=ResumableBatches(), max_epochs=2, ckpt_path=path)
    assert resumed.losses == whole.losses[AT:]
    assert same_weights(weights(resumed), weights(whole))
    assert plan.skipped_steps == len(BAD)
    assert any(hasattr(value, "dequantize") for value in whole.state()[0].values())
    assert all(map(torch.equal, _numbers(resumed.state()), _numbers(whole.state())))


def test_what_stock_lightning_saved_goes_on(tmp_path: Path) -> None:
    """It cannot load that itself: it names the device by a function, which torch does not ask for a subclass."""
    stock = Wide("AdamW8bit", ())
    fit(stock, **stock_for("16-mixed"), data=ResumableBatches(), max_epochs=2, callbacks=[SaveAt(tmp_path, AT)])
    resumed = Wide("AdamW8bit", ())
    path = tmp_path / f"{AT}.ckpt"
    fit(resumed, plugins=[plan_for("16-mixed")], data=ResumableBatches(), max_epochs=2, ckpt_path=path)
    assert resumed.losses == stock.losses[AT:]
