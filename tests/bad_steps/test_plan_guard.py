"""``NonFinite(save_batch=True)`` of a plan: what a guard on stock plugins saves and tells, the plan does too."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_mp import LossScaleError, LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError
from lightning_mp.callbacks import NonFiniteGuard
from support.models import batches
from support.nonfinite import FAULTS, Breaks
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
