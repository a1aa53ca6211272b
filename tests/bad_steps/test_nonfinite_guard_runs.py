"""The guard in all kinds of runs: manual optimization, odd optimizers, second fits, failures, resumed ones."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_mp import NonFiniteError, PlanError
from lightning_mp.callbacks import NonFiniteGuard
from support.manual import Pair, in_turn
from support.models import Regression, batches
from support.nonfinite import BAD, STOCK, Breaks
from support.oracles import stock_for
from support.running import fit
from support.saving import ResumableBatches, SaveAt
from support.traces import Trace

every_mode = pytest.mark.parametrize("mode", STOCK)


@pytest.fixture
def guard(tmp_path: Path) -> Any:
    return partial(NonFiniteGuard, run_dir=tmp_path)


# ---------------------------------------------------------------------- manual optimization and other optimizers


@every_mode
@pytest.mark.parametrize("which", ["net", "other", "net other"])
def test_of_several_optimizers_the_bad_one_skips(guard: Any, which: str, mode: str) -> None:
    watched, trace = guard(), Trace()
    fit(Pair(in_turn, {BAD: which}), callbacks=[watched, trace], **stock_for(mode))
    before, after = trace.weights[BAD - 1], trace.weights[BAD]
    assert {name.split(".")[0] for name in before if torch.equal(before[name], after[name])} == set(which.split())
    assert (watched.skipped_steps, watched.applied_steps) == (len(which.split()), 16 - len(which.split()))
    assert len(watched.events) == 1
    assert watched.events[0].module.startswith(which.split()[0])


def test_an_optimizer_that_needs_its_closure_is_refused(guard: Any) -> None:
    module = Regression(torch.optim.LBFGS)
    with pytest.raises(PlanError, match="LBFGS moves weights between two evaluations"):
        fit(module, callbacks=[guard()])
    assert module.losses == []


@pytest.mark.parametrize("where", ["on_after_backward", "on_before_optimizer_step"])
def test_a_gradient_that_a_hook_of_the_module_spoils_is_skipped_and_named(guard: Any, where: str) -> None:
    class Spoils(Regression):
        def _spoil(self, *_: Any) -> None:
            if self.trainer.global_step == BAD:
                self.net[0].weight.grad[0, 0] = float("nan")  # type: ignore[index,union-attr]

    module, watched = type("Hooked", (Spoils,), {where: Spoils._spoil})(), guard()
    fit(module, callbacks=[watched])
    (event,) = watched.events
    assert (event.step, event.module, event.parameter) == (BAD, "net.0", "net.0.weight")
    assert "changed after the backward pass" in event.cause
    assert (watched.skipped_steps, watched.applied_steps) == (1, 7)
    assert all(torch.isfinite(parameter).all() for parameter in module.parameters())
    assert "on_before_optimizer_step" not in vars(module)


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.:UserWarning")
@every_mode
@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_without_a_loss_after_a_bad_step_are_not_counted(guard: Any, mode: str, accumulate: int) -> None:
    class Without(Breaks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx > 2 * accumulate else super().training_step(batch, batch_idx)

    watched = guard(max_consecutive=1)
    fit(Without("loss", (2 * accumulate,)), callbacks=[watched], accumulate_grad_batches=accumulate, **stock_for(mode))
    assert (watched.skipped_steps, watched.applied_steps, len(watched.events)) == (1, 2, 1)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None:UserWarning")
@every_mode
@pytest.mark.parametrize("empty", [(0,), (BAD + 1, BAD + 2), (1, BAD + 1)])
def test_a_batch_that_is_none_is_no_step(guard: Any, empty: tuple[int, ...], mode: str) -> None:
    """As a collate function hands over that found nothing in the batch; Lightning leaves it out."""
    given = [None if batch_idx in empty else batch for batch_idx, batch in enumerate(batches())]
    watched = guard(max_consecutive=1)
    fit(Breaks("loss"), data=DataLoader(given, batch_size=None), callbacks=[watched], **stock_for(mode))
    assert (watched.skipped_steps, watched.applied_steps) == (1, 7 - len(empty))
    assert [(event.step, event.evidence["skips_in_a_row"]) for event in watched.events] == [
        (BAD - sum(batch_idx < BAD for batch_idx in empty), 1)
    ]


# ---------------------------------------------------------------------- the callback itself


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"on_trip": "rewnd"}, "on_trip='rewnd'"),
        ({"max_consecutive": -1}, "max_consecutive=-1"),
        ({"max_consecutive": True}, "max_consecutive=True"),
        ({"on_trip": "x", "max_consecutive": 1.5}, "2 errors"),
    ],
)
def test_bad_arguments_are_refused_together(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        NonFiniteGuard(**arguments)


def test_a_resumed_run_takes_the_counts_up(guard: Any, tmp_path: Path) -> None:
    first, second = guard(), guard(max_consecutive=2)
    fit(Breaks("loss", (1, 3)), callbacks=[first, SaveAt(tmp_path / "saved", 4)], data=ResumableBatches())
    with pytest.raises(NonFiniteError) as caught:
        fit(
            Breaks("loss", (4, 5)),
            callbacks=[second],
            data=ResumableBatches(),
            ckpt_path=tmp_path / "saved" / "4.ckpt",
        )
    assert caught.value.step == 5  # the skip of step 3 counts too
    assert (second.skipped_steps, second.applied_steps) == (4, 2)
