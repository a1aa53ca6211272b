"""Complaint 1, second half: a skipped step is not averaged into the weights a run ends with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, WeightAveraging

from lightning_mp import LossScaling
from support.models import Regression, weights
from support.oracles import plan_for
from support.running import fit
from support.traces import Trace

AVERAGES: dict[str, Any] = {
    "mean": WeightAveraging,
    "ema": lambda: EMAWeightAveraging(decay=0.5),
}
modes = pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])


def _expected(kind: str, start: Any, applied: list[Any]) -> Any:
    """The average, by hand, of the weights after each applied step."""
    average = dict(start)
    for count, step in enumerate(applied):
        for name, weight in step.items():
            # as torch.optim.swa_utils writes them: the first update copies
            part = 1 / (count + 1) if kind == "mean" else 0.5
            average[name] = weight if count == 0 else average[name] + (weight - average[name]) * part
    return average


def _run(kind: str, bad: tuple[int, ...], mode: str, **options: Any) -> tuple[Regression, Trace, Any]:
    # Average after the trace has looked: the last thing Lightning does is to put the average in the module's place.
    trace, average = Trace(), AVERAGES[kind]()
    module = Regression(partial(torch.optim.AdamW, lr=1e-2, eps=1e-4), overflow_at=bad)
    plan = plan_for(mode, LossScaling.static(64.0))
    fit(module, plugins=[plan], callbacks=[trace, average], **options)
    assert plan.skipped_steps == len(bad)
    return module, trace, average


@pytest.mark.parametrize("bad", [(0,), (2, 3), (0, 4, 7)])
@pytest.mark.parametrize("kind", AVERAGES)
@modes
def test_only_applied_steps_are_averaged(mode: str, kind: str, bad: tuple[int, ...]) -> None:
    module, trace, _ = _run(kind, bad, mode)
    applied = [weights for step, weights in enumerate(trace.weights) if step not in bad]
    expected = _expected(kind, trace.start, applied)
    for name, weight in weights(module).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_the_callback_is_given_back_and_can_be_saved(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=4)
    average = AVERAGES["ema"]()
    module = Regression(partial(torch.optim.AdamW, lr=1e-2), overflow_at=(1,))
    fit(module, plugins=[plan_for("16-mixed")], callbacks=[average, saver], enable_checkpointing=True)
    assert "should_update" not in average.__dict__
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    assert "averaging_state" in saved
