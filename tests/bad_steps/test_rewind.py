"""Back to the last good checkpoint, on behind the bad batch: of a guard on stock plugins, and of a plan."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError, PlanError
from lightning_mp.callbacks import NonFiniteGuard
from support.models import same_weights
from support.nonfinite import STOCK, Breaks
from support.oracles import stock_for
from support.running import fit
from support.traces import Trace

BAD = 5


class Spoilt(Breaks):
    """Its weights and optimizer state are changed by hand just before the batch ``at``."""

    def __init__(self, how: str, bad: tuple[int, ...], at: int = BAD) -> None:
        super().__init__(how, bad)
        self.at = at

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx != self.at:
            return
        with torch.no_grad():
            self.net[0].weight.add_(1)
        for state in self.trainer.optimizers[0].state.values():
            state["exp_avg"].add_(1)


def _every(folder: Path, steps: int, **options: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=steps, **options)


@dataclass
class Rewinds:
    kind: str
    run: Path

    def arguments(self, mode: str = "32-true", max_consecutive: int | None = None) -> dict[str, Any]:
        if self.kind == "guard":
            budget = {} if max_consecutive is None else {"max_consecutive": max_consecutive}
            return {"callbacks": [NonFiniteGuard("rewind", run_dir=self.run, **budget)], **stock_for(mode)}
        rule = NonFinite(max_consecutive=max_consecutive or 0, on_budget="rewind", run_dir=str(self.run))
        # under loss scaling only what is skipped at the scale's floor counts
        scaling = {"loss_scaling": LossScaling(init_scale=1)} if mode.startswith("16") else {}
        return {"callbacks": [], "plugins": [MixedPrecisionPlan(mode, nonfinite=rule, **scaling)]}

    def fit(self, module: Any, *callbacks: Callback, mode: str = "32-true", **budget: int) -> Trainer:
        arguments = self.arguments(mode, **budget)
        beside = [*arguments.pop("callbacks"), *callbacks]
        saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        return fit(module, callbacks=beside, enable_checkpointing=saves, **arguments)

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run / "events.jsonl").read_text().splitlines()]


@pytest.fixture(params=["guard", "plan"])
def rewinds(request: pytest.FixtureRequest, tmp_path: Path) -> Rewinds:
    return Rewinds(request.param, tmp_path / "run")


def _scheduled(module: Breaks) -> Breaks:
    module.make_scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    return module


@pytest.mark.parametrize("mode", STOCK)
@pytest.mark.parametrize("every", [1, 2, 4])
def test_all_is_as_the_checkpoint_was_and_it_goes_on(tmp_path: Path, rewinds: Rewinds, every: int, mode: str) -> None:
    module, trace = _scheduled(Spoilt("loss", (BAD,))), Trace()
    saved = _every(tmp_path / "saved", every)
    runner = rewinds.fit(module, trace, saved, mode=mode)
    assert runner.ckpt_path is None
    last = BAD // every * every  # the step after which it was written
    assert same_weights(trace.weights[BAD], trace.weights[last - 1])
    torch.testing.assert_close(trace.states[BAD], trace.states[last - 1], rtol=0, atol=0)
    assert trace.scales[BAD : BAD + 1] == trace.scales[last - 1 : last]
    assert len(trace.scales) == (8 if mode == "16-mixed" else 0)
    assert trace.global_steps == list(range(1, 9))
    assert module.lrs[BAD + 1] == module.lrs[last]
    assert len(module.losses) == 8
    assert not same_weights(trace.weights[7], trace.weights[BAD])
    assert [(event["step"], event["action"]) for event in rewinds.events] == [(BAD, "rewind")]


def test_a_checkpoint_with_bad_weights_is_passed_over(tmp_path: Path, rewinds: Rewinds) -> None:
    class Poisons(Callback):
        def on_train_batch_end(
            self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:  # after the step, before the checkpoint is written
                with torch.no_grad():
                    pl_module.net[1].weight[0] = float("nan")

    trace, saved = Trace(), _every(tmp_path / "saved", 2, save_top_k=-1)
    rewinds.fit(Breaks("loss", ()), trace, Poisons(), saved)
    assert [(event["step"], event["module"]) for event in rewinds.events] == [(4, "net.1")]
    assert same_weights(trace.weights[4], trace.weights[1])


def test_without_a_model_checkpoint_it_is_refused_at_the_start(rewinds: Rewinds, tmp_path: Path) -> None:
    module = Breaks("loss")
    with pytest.raises(PlanError, match=r"'rewind'.* without a ModelCheckpoint"):
        rewinds.fit(module)
    with pytest.raises(PlanError, match="without a ModelCheckpoint that saves optimizer states"):
        rewinds.fit(module, _every(tmp_path, 1, save_weights_only=True))
    assert module.losses == []


def test_before_the_first_checkpoint_it_raises_and_says_so(rewinds: Rewinds, tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="no checkpoint with finite weights was written before it") as caught:
        rewinds.fit(Breaks("loss"), _every(tmp_path / "saved", 4))
    assert (caught.value.step, caught.value.module) == (3, "net.4")


def test_the_budget_of_the_guard_holds_for_rewinds_too(tmp_path: Path) -> None:
    guarded, saved = Rewinds("guard", tmp_path / "run"), _every(tmp_path / "saved", 1)
    with pytest.raises(NonFiniteError) as caught:
        guarded.fit(Breaks("loss", (4, 5, 6, 7)), saved, max_consecutive=2)
    assert caught.value.step == 6
    assert [event["action"] for event in guarded.events] == ["rewind", "rewind", "raise"]


def test_the_plan_rewinds_once_its_budget_is_spent(tmp_path: Path) -> None:
    planned, trace = Rewinds("plan", tmp_path / "run"), Trace()
    module = Spoilt("loss", (5, 6, 7), at=4)
    runner = planned.fit(module, trace, _every(tmp_path / "saved", 4), max_consecutive=2)
    plan: Any = runner.precision_plugin
    assert [(event["step"], event["action"]) for event in planned.events] == [(7, "rewind")]
    assert same_weights(trace.weights[7], trace.weights[3])
    assert not same_weights(trace.weights[6], trace.weights[3])
    assert (plan.skipped_steps, plan.applied_steps, plan.loss_scaler.streak) == (3, 5, 0)
