"""Back to the last good checkpoint, on behind the bad batch: of a guard on stock plugins, and of a plan."""

import json
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_mp import LossScaling, MixedPrecisionPlan, NonFinite, NonFiniteError, PlanError
from lightning_mp.callbacks import NonFiniteGuard
from support.models import same_weights
from support.nonfinite import STOCK, Breaks
from support.oracles import stock_for
from support.running import fit
from support.saving import ResumableBatches, SaveAt
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


def _every(folder: Path | str, steps: int, **options: Any) -> ModelCheckpoint:
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

    def fit(
        self,
        module: Any,
        *callbacks: Callback,
        mode: str = "32-true",
        max_consecutive: int | None = None,
        beside: Any = (),
        **options: Any,
    ) -> Trainer:
        arguments = self.arguments(mode, max_consecutive)
        arguments["plugins"] = [*arguments.get("plugins", ()), *beside]
        callbacks = (*arguments.pop("callbacks"), *callbacks)
        saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
        arguments["callbacks"] = list(callbacks)
        return fit(module, enable_checkpointing=saves, **arguments, **options)

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


class Touches:
    """A pickle of it makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_it_loads_no_file_that_only_a_checkpoint_names(rewinds: Rewinds, tmp_path: Path) -> None:
    """``best_model_path`` of a resumed checkpoint may be any file of the machine."""
    first = _every(tmp_path / "first", 2)
    rewinds.fit(Breaks("loss", ()), first, SaveAt(tmp_path, 4), data=ResumableBatches())
    content = torch.load(tmp_path / "4.ckpt", weights_only=False)
    marker, foreign = tmp_path / "code ran", tmp_path / "foreign.ckpt"
    torch.save({**content, "code": Touches(marker)}, foreign)
    for name, state in content["callbacks"].items():
        if name.startswith("ModelCheckpoint"):
            state.update(best_model_path=str(foreign), last_model_path=str(foreign))
            state["best_k_models"] = {str(foreign): torch.tensor(0.0)}
    torch.save(content, tmp_path / "named.ckpt")
    os.utime(foreign, (2e9, 2e9))  # the newest of all
    module, trace = Spoilt("loss", (BAD,)), Trace()
    resumed = {"ckpt_path": tmp_path / "named.ckpt", "data": ResumableBatches()}
    rewinds.fit(module, trace, _every(tmp_path / "first", 2), **resumed)
    assert not marker.exists()
    assert [(event["step"], event["action"]) for event in rewinds.events] == [(BAD, "rewind")]
    assert same_weights(trace.weights[BAD - 4], content["state_dict"])


def test_it_goes_back_to_what_any_callback_of_the_fit_saved(rewinds: Rewinds, tmp_path: Path) -> None:
    trace = Trace()
    saves = SaveAt(tmp_path, 3), _every(tmp_path / "first", 100)
    rewinds.fit(Spoilt("loss", (BAD,)), trace, *saves)
    assert same_weights(trace.weights[BAD], trace.weights[2])


def test_a_file_of_weights_alone_is_no_checkpoint_to_go_back_to(rewinds: Rewinds, tmp_path: Path) -> None:
    trace = Trace()
    saves = _every(tmp_path / "all", 2), _every(tmp_path / "weights", 1, save_weights_only=True)
    rewinds.fit(Spoilt("loss", (BAD,)), trace, *saves)
    assert same_weights(trace.weights[BAD], trace.weights[3])


def test_it_finds_checkpoints_behind_any_protocol(rewinds: Rewinds, tmp_path: Path) -> None:
    trace = Trace()
    rewinds.fit(Spoilt("loss", (BAD,)), trace, _every(f"memory://{tmp_path.name}", 2))
    assert same_weights(trace.weights[BAD], trace.weights[3])
    assert [event["action"] for event in rewinds.events] == ["rewind"]


class Slow(TorchCheckpointIO):
    """Takes longer for a checkpoint than the step after it takes."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        time.sleep(0.2)
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize("kept", [1, -1])
def test_it_waits_for_a_checkpoint_that_is_being_written(rewinds: Rewinds, kept: int, tmp_path: Path) -> None:
    trace = Trace()
    saves = _every(tmp_path / "saved", 1, save_top_k=kept)
    rewinds.fit(Spoilt("loss", (BAD,)), trace, saves, beside=[AsyncCheckpointIO(Slow())])
    assert same_weights(trace.weights[BAD], trace.weights[BAD - 1])
    assert torch.load(saves.best_model_path, weights_only=True)["global_step"] == 8
