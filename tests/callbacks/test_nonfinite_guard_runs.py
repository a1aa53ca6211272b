"""The guard in all kinds of runs: manual optimization, odd optimizers, second fits, failures, resumed ones."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from lightning_mp import NonFiniteError, PlanError
from lightning_mp.callbacks import NonFiniteGuard
from lightning_mp.monitor.actions import ReduceLR
from support.manual import Pair, in_turn
from support.models import Regression, batches, same_weights, weights
from support.nonfinite import BAD, STOCK, Breaks, without
from support.oracles import MODES, plan_for, stock_for
from support.running import fit, trainer
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
    with pytest.raises(PlanError, match="LBFGS, which moves weights between two evaluations"):
        fit(module, callbacks=[guard()])
    assert module.losses == []


class Twice(SGD):
    """Moves, evaluates again, and moves back (SAM and its kind)."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.first = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step()
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter, value in zip(group["params"], self.first, strict=True):
                    parameter.copy_(value)
        super().step()
        return loss


def test_a_second_evaluation_of_a_bad_batch_is_dropped_too(guard: Any) -> None:
    watched, broken, clean = guard(), *(Breaks("batch", bad, partial(Twice, lr=1e-3)) for bad in ((BAD,), ()))
    fit(broken, callbacks=[watched])
    fit(clean, data=without(BAD))
    assert same_weights(weights(broken), weights(clean))
    assert (watched.skipped_steps, watched.applied_steps) == (1, 7)


def test_a_second_evaluation_that_alone_is_bad_stops_the_run(guard: Any) -> None:
    """Weights have moved by then; only the optimizer knows how to bring them back."""

    class Later(Breaks):
        seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += 1
            self.bad = (batch_idx,) if self.seen == 6 else ()
            return super().training_step(batch, batch_idx)

    with pytest.raises(NonFiniteError, match="a non-finite value at step 2 when Twice evaluated its closure again"):
        fit(Later("batch", (), partial(Twice, lr=1e-3)), callbacks=[guard()])


# ---------------------------------------------------------------------- a lower learning rate


def test_reduce_lr_lowers_the_rate_on_top_of_the_scheduler_and_gives_it_back(guard: Any) -> None:
    used: list[float] = []

    class Sees(SGD):
        def step(self, closure: Any = None) -> Any:
            used.append(self.param_groups[0]["lr"])
            return super().step(closure)

    module = Breaks("loss", optimizer=partial(Sees, lr=1e-3))
    module.make_scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    watched = guard(ReduceLR(factor=0.1, steps=2))
    fit(module, callbacks=[watched])
    rates = [1e-3 * 0.5**k for k in (0, 1, 2, 3, 3, 4, 5, 6)]  # batch 3 does not move the schedule
    rates[BAD + 1 : BAD + 3] = [rate * 0.1 for rate in rates[BAD + 1 : BAD + 3]]
    assert used == pytest.approx(rates)
    assert watched.events[0].action.startswith("reduce_lr")


# ---------------------------------------------------------------------- the callback itself


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"on_trip": "rewnd"}, "on_trip='rewnd'"),
        ({"max_consecutive": -1}, "max_consecutive=-1"),
        ({"max_consecutive": True}, "max_consecutive=True"),
        ({"on_trip": "x", "max_consecutive": 1.5}, "2 faults"),
    ],
)
def test_bad_arguments_are_refused_together(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        NonFiniteGuard(**arguments)


@pytest.mark.parametrize("mode", MODES)
def test_beside_a_plan_it_names_the_plans_field(guard: Any, mode: str) -> None:
    with pytest.raises(PlanError, match=r"MixedPrecisionPlan\(nonfinite=\.\.\.\)"):
        fit(Regression(), plugins=[plan_for(mode)], callbacks=[guard()])


def test_copies_are_of_no_run(guard: Any) -> None:
    watched, module = guard(), Breaks("loss")
    runner = trainer(callbacks=[watched])
    runner.fit(module, batches())
    for copied in (copy.deepcopy(watched), pickle.loads(pickle.dumps(watched))):
        assert copied.skipped_steps == 1
        fit(Breaks("loss"), callbacks=[copied])
        assert copied.skipped_steps == 1
        assert len(copied.events) == 1


def test_a_second_fit_goes_on_and_another_run_begins_anew(guard: Any, tmp_path: Path) -> None:
    watched, module = guard(), Breaks("loss", (1,))
    runner = trainer(callbacks=[watched])
    runner.fit(module, batches())
    runner.fit_loop.max_epochs = 2
    module.breaks_on = lambda batch_idx: batch_idx == 2  # type: ignore[method-assign]
    runner.fit(module, batches())
    assert [event.step for event in watched.events] == [1, 10]
    assert (watched.skipped_steps, watched.applied_steps) == (2, 14)
    fit(Breaks("loss", (5,)), callbacks=[watched])
    assert [event.step for event in watched.events] == [5]
    assert [path.name for path in (tmp_path / "nonfinite").iterdir()] == ["step_000005_rank0.pt"]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_given_back(guard: Any, fails: bool, tmp_path: Path) -> None:
    class Fails(Breaks):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if fails and batch_idx == 5:
                raise KeyError("planned")
            return super().training_step(batch, batch_idx)

    watched, module = guard(), Fails("loss")
    module.make_scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
    try:
        fit(module, callbacks=[watched])
    except KeyError:
        assert fails
    assert not {"lr_scheduler_step", "log", "log_dict"} & set(vars(module))
    assert not (tmp_path / ".lightning_mp.lock").exists()
    fit(Breaks("loss"), callbacks=[watched])
    assert watched.skipped_steps == 1


def test_validation_alone_writes_nothing(guard: Any, tmp_path: Path) -> None:
    class Validates(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(batch)

    trainer(callbacks=[guard()]).validate(Validates(), batches(), verbose=False)
    assert list(tmp_path.iterdir()) == []


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
