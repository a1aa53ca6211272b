"""``on_trip="rewind"``: back to the last good checkpoint, on behind the bad batch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mp import NonFiniteError, PlanError
from lightning_mp.callbacks import NonFiniteGuard
from support.models import same_weights, weights
from support.nonfinite import STOCK, Breaks
from support.oracles import stock_for
from support.running import fit
from support.traces import Trace

BAD = 5


class Spoilt(Breaks):
    """Its weights, optimizer state and scale are changed by hand just before batch ``BAD`` breaks."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != BAD:
            return
        with torch.no_grad():
            self.net[0].weight.add_(1)
        for state in self.trainer.optimizers[0].state.values():
            state["exp_avg"].add_(1)


def _every(folder: Path, steps: int, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=steps, **options)


@pytest.fixture
def guard(tmp_path: Path) -> NonFiniteGuard:
    return NonFiniteGuard("rewind", run_dir=tmp_path / "run")


def _scheduled(module: Breaks) -> Breaks:
    module.make_scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    return module


class Scales(Callback):
    """The stock scaler's scale after every batch."""

    def __init__(self) -> None:
        self.scales: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(1.0 if scaler is None else scaler.get_scale())


@pytest.mark.parametrize("mode", STOCK)
@pytest.mark.parametrize("every", [1, 2, 4])
def test_all_is_as_the_checkpoint_was_and_the_run_goes_on(
    tmp_path: Path, guard: NonFiniteGuard, every: int, mode: str
) -> None:
    module, trace, scales = _scheduled(Spoilt("loss", (BAD,))), Trace(), Scales()
    saved = _every(tmp_path / "saved", every)
    runner = fit(module, callbacks=[guard, trace, scales, saved], enable_checkpointing=True, **stock_for(mode))
    assert runner.ckpt_path is None
    last = BAD // every * every  # the step after which it was written
    assert same_weights(trace.weights[BAD], trace.weights[last - 1])
    torch.testing.assert_close(trace.states[BAD], trace.states[last - 1], rtol=0, atol=0)
    assert scales.scales[BAD] == scales.scales[last - 1]
    assert trace.global_steps == list(range(1, 9))
    assert module.lrs[BAD + 1] == module.lrs[last]
    assert len(module.losses) == 8
    assert not same_weights(trace.weights[7], trace.weights[BAD])
    assert [(event.step, event.action) for event in guard.events] == [(BAD, "rewind")]


@pytest.mark.filterwarnings("ignore:.*returned `None`")
def test_it_is_the_run_from_that_checkpoint_without_the_batches_between(tmp_path: Path, guard: NonFiniteGuard) -> None:
    class Skips(Breaks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx in (4, 5) else super().training_step(batch, batch_idx)

    rewound, oracle = Spoilt("loss", (BAD,)), Skips("loss", ())
    fit(rewound, callbacks=[guard, _every(tmp_path / "saved", 4)], enable_checkpointing=True)
    fit(oracle)
    assert same_weights(weights(rewound), weights(oracle))


def test_a_checkpoint_with_bad_weights_is_passed_over(tmp_path: Path, guard: NonFiniteGuard) -> None:
    class Poisons(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:  # after the step, before the checkpoint is written
                with torch.no_grad():
                    pl_module.net[1].weight[0] = float("nan")

    trace, saved = Trace(), _every(tmp_path / "saved", 2, save_top_k=-1)
    fit(Breaks("loss", ()), callbacks=[guard, trace, Poisons(), saved], enable_checkpointing=True)
    assert [event.step for event in guard.events] == [4]
    assert guard.events[0].module == "net.1"
    assert same_weights(trace.weights[4], trace.weights[1])


def test_without_a_model_checkpoint_it_is_refused_at_the_start(guard: NonFiniteGuard, tmp_path: Path) -> None:
    module = Breaks("loss")
    with pytest.raises(PlanError, match="on_trip='rewind' without a ModelCheckpoint"):
        fit(module, callbacks=[guard])
    with pytest.raises(PlanError, match="without a ModelCheckpoint that saves optimizer states"):
        fit(module, callbacks=[guard, _every(tmp_path, 1, save_weights_only=True)], enable_checkpointing=True)
    assert module.losses == []


def test_before_the_first_checkpoint_it_raises_and_says_so(guard: NonFiniteGuard, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="before any checkpoint with finite weights was written") as caught:
        fit(Breaks("loss"), callbacks=[guard, _every(tmp_path / "saved", 4)], enable_checkpointing=True)
    assert (caught.value.step, caught.value.module) == (3, "net.4")


def test_the_budget_holds_for_rewinds_too(tmp_path: Path) -> None:
    guard = NonFiniteGuard("rewind", max_consecutive=2, run_dir=tmp_path / "run")
    saved = _every(tmp_path / "saved", 1)
    with pytest.raises(NonFiniteError) as caught:
        fit(Breaks("loss", (4, 5, 6, 7)), callbacks=[guard, saved], enable_checkpointing=True)
    assert caught.value.step == 6
    assert [event.action for event in guard.events] == ["rewind", "rewind", "raise"]
