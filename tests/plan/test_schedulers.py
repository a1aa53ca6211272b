"""Complaint 1 (PL 5558, 16228, 21339): a skipped step does not advance the learning rate, and is not averaged."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch.optim import AdamW
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from lightning_mp import LossScaling
from support.models import Regression, weights
from support.oracles import plan_for
from support.running import fit
from support.traces import Trace

STEPS = 16  # two epochs
adamw, adamw_fused = partial(AdamW, lr=1e-2, eps=1e-4), partial(AdamW, lr=1e-2, eps=1e-4, fused=True)


def _warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 5)


def _hf_cosine(optimizer: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=STEPS)


def _sequence(optimizer: Any) -> Any:
    halves = [LinearLR(optimizer, 0.1, total_iters=4), ConstantLR(optimizer, 0.5, total_iters=100)]
    return SequentialLR(optimizer, halves, milestones=[6])


SCHEDULERS: dict[str, Any] = {
    "OneCycleLR": partial(OneCycleLR, max_lr=1e-2, total_steps=STEPS),
    "warm-up lambda": partial(LambdaLR, lr_lambda=_warm_up),
    "transformers cosine with warm-up": _hf_cosine,
    "SequentialLR": _sequence,
}
#: in the first steps, at the turn of an epoch, and in the last step
BAD = (0, 1, 3, 7, 8, 15)


@cache
def _stock_sequence(scheduler: str) -> list[float]:
    module = Regression(adamw, SCHEDULERS[scheduler])
    fit(module, precision="32-true", max_epochs=2)
    return module.lrs


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("mode", "optimizer"), [("bf16-mixed", adamw), ("16-mixed", adamw_fused)])
def test_the_schedule_is_stocks_with_the_skipped_steps_removed(mode: str, optimizer: Any, scheduler: str) -> None:
    module = Regression(optimizer, SCHEDULERS[scheduler], overflow_at=BAD)
    plan = plan_for(mode)
    runner = fit(module, plugins=[plan], max_epochs=2)
    assert plan.skipped_steps == len(BAD)
    stock = _stock_sequence(scheduler)
    assert module.lrs == [stock[step - sum(bad < step for bad in BAD)] for step in range(STEPS)]
    assert runner.lr_scheduler_configs[0].scheduler.last_epoch == STEPS - len(BAD)


def test_epoch_schedulers_step_even_if_the_epochs_last_step_was_skipped() -> None:
    class EachEpoch(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = self.make_optimizer(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = EachEpoch(adamw, overflow_at=(7,))
    plan = plan_for("16-mixed")
    fit(module, plugins=[plan], max_epochs=2)
    assert plan.step_skipped is False
    assert plan.skipped_steps == 1
    assert module.lrs == [1e-2] * 8 + [5e-3] * 8


def test_a_step_that_came_to_nothing_moves_the_schedule_as_in_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """``training_step`` returning None is neither applied nor skipped: an older skip must not hold its schedule."""
    monkeypatch.setattr(Closure, "warning_cache", WarningCache())  # it warns once in a process

    class Sometimes(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx in (2, 3, 5) else loss

    module = Sometimes(scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)), overflow_at=(1,))
    with pytest.warns(UserWarning, match="returned `None`"):
        fit(module, plugins=[plan_for("bf16-mixed")])
    # step 1 is skipped, so steps 1 and 2 see the same rate; every other batch moves it on
    assert [round(1e-2 / rate) - 1 for rate in module.lrs] == [0, 1, 1, 2, 3, 4, 5, 6]


AVERAGES: dict[str, Any] = {"mean": WeightAveraging, "ema": partial(EMAWeightAveraging, decay=0.5)}


def _expected(kind: str, start: Any, applied: list[Any]) -> Any:
    """The average, by hand, of the weights after each applied step."""
    average = dict(start)
    for count, step in enumerate(applied):
        for name, weight in step.items():
            # as torch.optim.swa_utils writes them: the first update copies
            part = 1 / (count + 1) if kind == "mean" else 0.5
            average[name] = weight if count == 0 else average[name] + (weight - average[name]) * part
    return average


@pytest.mark.parametrize("bad", [(0,), (2, 3), (0, 4, 7)])
@pytest.mark.parametrize("kind", AVERAGES)
@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
def test_only_applied_steps_are_averaged(mode: str, kind: str, bad: tuple[int, ...]) -> None:
    # Average after the trace has looked: the last thing Lightning does is to put the average in the module's place.
    trace, module = Trace(), Regression(adamw, overflow_at=bad)
    plan = plan_for(mode, LossScaling.static(64.0))
    fit(module, plugins=[plan], callbacks=[trace, AVERAGES[kind]()])
    assert plan.skipped_steps == len(bad)
    applied = [weights for step, weights in enumerate(trace.weights) if step not in bad]
    expected = _expected(kind, trace.start, applied)
    for name, weight in weights(module).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
