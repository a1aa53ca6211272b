"""``NonFinite(save_batch=True)`` of a plan: what a guard on stock plugins saves and tells, the plan does too."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_mp import LossScaleError, LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError
from lightning_mp.callbacks import NonFiniteGuard, TrainingHealth, replay_saved
from support.models import batches
from support.nonfinite import BAD, FAULTS, Breaks
from support.oracles import plan_for, stock_for
from support.running import fit, trainer

# A plan looks at gradients, and those of a loss of inf may be finite.
SKIPPED = [how for how in FAULTS if how not in ("weight", "infinite loss")]


def _events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def _saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "nonfinite").glob("*.pt"))


def _plan(mode: str, folder: Path, **rule: Any) -> MixedPrecisionPlan:
    return plan_for(mode, nonfinite=NonFinite(save_batch=True, run_dir=str(folder), **rule))


@pytest.mark.parametrize("mode", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("how", SKIPPED)
def test_it_tells_and_saves_what_the_guard_does(how: str, mode: str, tmp_path: Path) -> None:
    fit(Breaks(how), plugins=[_plan(mode, tmp_path / "plan")])
    fit(Breaks(how), callbacks=[NonFiniteGuard(run_dir=tmp_path / "guard")], **stock_for(mode))
    (told,), (other,) = _events(tmp_path / "plan"), _events(tmp_path / "guard")
    for field in ("step", "kind", "severity", "rank", "module", "parameter", "cause", "action"):
        assert told[field] == other[field], field
    assert _saved(tmp_path / "plan") == _saved(tmp_path / "guard")


def test_the_saved_batch_can_be_run_again(tmp_path: Path) -> None:
    data = list(batches())
    data[BAD][0][0, 0] = float("nan")
    module = Breaks("batch", ())
    fit(module, data=DataLoader(data, batch_size=None), plugins=[_plan("32-true", tmp_path)])
    loss, origin = replay_saved(tmp_path / "nonfinite" / f"step_{BAD:06d}_rank0.pt", module, nullcontext())
    assert loss is not None
    assert not torch.isfinite(loss)
    assert origin is not None
    assert origin.module == "net.0"


@pytest.mark.parametrize("action", ["skip", "raise"])
def test_the_batch_that_ends_the_run_is_saved_and_the_error_is_the_plans(action: str, tmp_path: Path) -> None:
    def error(**rule: Any) -> NonFiniteError:
        with pytest.raises(NonFiniteError) as caught:
            fit(Breaks("loss"), plugins=[plan_for("32-true", nonfinite=NonFinite(action=action, **rule))])
        return caught.value

    budget = {"max_consecutive": 0}
    saving, plain = error(save_batch=True, run_dir=str(tmp_path), **budget), error(**budget)
    assert str(saving) == str(plain)
    assert (saving.step, saving.module, saving.rank) == (plain.step, plain.module, plain.rank)
    assert [event["action"] for event in _events(tmp_path)] == ["raise"]
    assert len(_saved(tmp_path)) == 1


def test_an_overflow_at_the_minimum_scale_stays_a_loss_scale_error(tmp_path: Path) -> None:
    scaling = LossScaling(init_scale=1, min_scale=1, at_min="raise")
    plan = MixedPrecisionPlan(
        "16-mixed", loss_scaling=scaling, nonfinite=NonFinite(save_batch=True, run_dir=str(tmp_path))
    )
    with pytest.raises(LossScaleError, match="overflow at the minimum loss scale"):
        fit(Breaks("gradient"), plugins=[plan])
    assert len(_saved(tmp_path)) == 1


def test_beside_training_health_there_is_one_event_a_step(tmp_path: Path) -> None:
    health = TrainingHealth(run_dir=tmp_path)
    fit(Breaks("loss"), plugins=[_plan("32-true", tmp_path)], callbacks=[health])
    assert [event["kind"] for event in _events(tmp_path)] == ["nonfinite_loss"]


@pytest.mark.parametrize("fails", [False, True])
def test_the_trainers_callbacks_are_given_back(fails: bool, tmp_path: Path) -> None:
    class Fails(Callback):
        def on_train_batch_end(self, *arguments: Any) -> None:
            if fails:
                raise RuntimeError("on purpose")

    runner = trainer(plugins=[_plan("32-true", tmp_path)], callbacks=[Fails()])
    before = list(runner.callbacks)
    with pytest.raises(RuntimeError, match="on purpose") if fails else nullcontext():
        runner.fit(Breaks("loss", ()), batches())
    assert runner.callbacks == before
    fit(Breaks("loss", ()), plugins=[_plan("32-true", tmp_path)])  # the folder is free again


def test_a_fit_that_fails_while_it_begins_leaves_no_callback_and_no_lock(tmp_path: Path) -> None:
    class Fails(CSVLogger):
        def log_hyperparams(self, params: Any = None) -> None:
            raise RuntimeError("on purpose")

    runner = trainer(plugins=[_plan("32-true", tmp_path)], logger=Fails(tmp_path / "logs"))
    before = list(runner.callbacks)
    with pytest.raises(RuntimeError, match="on purpose"):
        runner.fit(Breaks("loss", ()), batches())
    assert runner.callbacks == before
    fit(Breaks("loss", ()), plugins=[_plan("32-true", tmp_path)])  # the folder is free again
