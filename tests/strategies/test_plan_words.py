"""A plan as words: ``precision=`` with an ``mp_*`` name, plans by name, and the lives that packages lead with them."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, DoublePrecision

from lightning_mp import MixedPrecisionPlan, PlanError, make_strategy, register_plan, trainer_kwargs
from lightning_mp.strategies.registry import STRATEGIES
from support.models import Regression, batches, same_weights, weights
from support.ranks import in_a_process
from support.running import fit
from support.running import trainer as quiet

every_name = pytest.mark.parametrize("name", STRATEGIES)
#: Lightning's own word on what it makes of fp16 on a CPU, which does not hold here
ON_A_CPU = "ignore:.*AMP with fp16 is not supported on CPU"
#: torch's own word on the scaler that Lightning makes for FSDP1, which is not used here
NO_CUDA = "ignore:torch.cuda.amp.GradScaler is enabled"
DEFAULTS = {"accelerator": "cpu", "devices": 1, "logger": False}


def _plan_of(**given: Any) -> MixedPrecisionPlan:
    plan = Trainer(**{**DEFAULTS, **given}).precision_plugin
    assert isinstance(plan, MixedPrecisionPlan)
    return plan


@pytest.mark.filterwarnings(ON_A_CPU, NO_CUDA, "ignore:.*for historical reasons")
@pytest.mark.parametrize(
    ("name", "word"),
    [
        *(("ddp", word) for word in ("32-true", "bf16-mixed", "bf16-true", "16-true", 16, "bf16", None)),
        *((name, "16-mixed") for name in STRATEGIES),
    ],
)
def test_lightnings_word_is_the_plan(name: str, word: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        plan = _plan_of(strategy=f"mp_{name}", **({} if word is None else {"precision": word}))
    expected = MixedPrecisionPlan("32-true" if word is None else word)
    assert plan.same_as(expected)
    assert repr(expected) in caplog.text


@every_name
def test_a_word_that_no_plan_has_is_refused(name: str) -> None:
    with pytest.raises((PlanError, ValueError), match="64-true"):
        _plan_of(strategy=f"mp_{name}", precision="64-true")


@pytest.mark.filterwarnings(ON_A_CPU)
@pytest.mark.parametrize("name", ["auto", "ddp"])
def test_a_run_by_word_is_that_of_the_plan_in_fp16_on_a_cpu(name: str) -> None:
    worded, planned, plan = Regression(), Regression(), MixedPrecisionPlan("16-mixed")
    run = fit(worded, strategy=f"mp_{name}", precision="16-mixed")
    fit(planned, plugins=[plan])
    assert same_weights(weights(worded), weights(planned))
    assert run.precision_plugin.skipped_steps == plan.skipped_steps > 0
    assert run.precision == "16-mixed"


@every_name
def test_a_plan_by_name_is_the_runs_beside_any_precision(name: str, caplog: pytest.LogCaptureFixture) -> None:
    plan = MixedPrecisionPlan("bf16-mixed")
    register_plan("Mine_1-x", plan)
    alone = _plan_of(strategy=f"mp_{name}@Mine_1-x")
    with caplog.at_level(logging.INFO):
        beside = _plan_of(strategy=f"mp_{name}@mine_1-x", precision="16-true", plugins=[AsyncCheckpointIO()])
    assert "precision='16-true' is not used" in caplog.text
    assert plan.same_as(alone)
    assert plan.same_as(beside)
    assert len({id(plan), id(alone), id(beside)}) == 3
    with pytest.raises(PlanError, match="DoublePrecision"):
        _plan_of(strategy=f"mp_{name}@mine_1-x", plugins=[DoublePrecision()])


def _four_steps_by_words(*names: str) -> list[tuple[str, int]]:
    register_plan("mine", MixedPrecisionPlan("16-mixed", pins={"norms": "fp32"}))
    found = list[tuple[str, int]]()
    for name in names:
        module = Regression(lambda p: torch.optim.AdamW(p, lr=1e-2))
        plan = fit(module, strategy=f"mp_{name}@mine", precision="32-true", max_steps=4).precision_plugin
        found.append((repr(plan), plan.applied_steps + plan.skipped_steps))
    return found


@pytest.mark.gloo
def test_a_sharding_strategy_runs_the_plan_of_that_name() -> None:
    expected = (repr(MixedPrecisionPlan("16-mixed", pins={"norms": "fp32"})), 4)
    assert in_a_process(_four_steps_by_words, "fsdp2", "deepspeed_zero2") == [expected] * 2


def _ways(plan: MixedPrecisionPlan) -> dict[str, dict[str, Any]]:
    quiet = {"accelerator": "cpu", "devices": 1}
    return {
        "a factory's arguments": {**trainer_kwargs(plan, strategy="ddp"), **quiet},
        "a strategy object": {"strategy": make_strategy("ddp", plan), **quiet},
        "both": {"strategy": make_strategy("ddp", plan), "plugins": [plan, AsyncCheckpointIO()], **quiet},
        "a name": {"strategy": "mp_ddp", "plugins": [plan]},
        "stock": {"plugins": [plan]},
    }


every_way = pytest.mark.parametrize("way", _ways(MixedPrecisionPlan("32-true")))


@every_way
def test_arguments_are_kept_and_used_for_many_trainers(way: str) -> None:
    kept = _ways(MixedPrecisionPlan("bf16-mixed"))[way]
    modules = [Regression() for _ in range(3)]
    runs = [fit(module, **kept) for module in modules]
    assert all(same_weights(weights(modules[0]), weights(module)) for module in modules)
    assert [run.precision_plugin.applied_steps for run in runs[2:]] == [8]
    assert len({id(run.strategy) for run in runs}) == 3


class Predicting(Regression):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))


class RunsInside(Callback):
    def __init__(self, arguments: dict[str, Any], same: bool = False) -> None:
        self.arguments, self.same, self.dtypes = arguments, same, set[Any]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            module = pl_module if self.same else Predicting()
            predicted = quiet(**self.arguments).predict(module, batches())
            self.dtypes = {one.dtype for one in predicted}
            quiet(**self.arguments).validate(module, batches(), verbose=False)


no_validation = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@no_validation
@every_way
def test_a_trainer_inside_a_fit_leaves_the_run_around_it_alone(way: str) -> None:
    plan, alone = (MixedPrecisionPlan("16-mixed", pins={"norms": "fp32"}) for _ in range(2))
    kept, oracle, module = _ways(plan)[way], Predicting(), Predicting()
    fit(oracle, plugins=[alone])
    inside = RunsInside(kept)
    run = fit(module, **kept, callbacks=[inside])
    assert module.losses == oracle.losses
    assert same_weights(weights(module), weights(oracle))
    assert run.precision_plugin.state_dict() == alone.state_dict()
    assert plan.engine is None
    assert inside.dtypes == {torch.float16}
    assert module.trainer is run


@no_validation
def test_a_trainer_inside_a_fit_of_the_same_module_is_refused() -> None:
    plan = MixedPrecisionPlan("16-mixed", pins={"norms": "fp32"})
    with pytest.raises(PlanError, match="inside the run of another one, on the same module"):
        fit(Predicting(), plugins=[plan], callbacks=[RunsInside({"plugins": [plan]}, same=True)])
    assert plan.engine is None


def test_trainers_that_take_turns_keep_their_scales() -> None:
    def seen(*plans: MixedPrecisionPlan) -> list[dict[str, Any]]:
        runs = [
            (quiet(plugins=[plan], max_epochs=1), Regression(overflow_at=(6,) * first), plan)
            for first, plan in zip((1, 0), plans, strict=True)
        ]
        states: list[dict[str, Any]] = []
        for runner, module, plan in (*runs, *runs):
            runner.fit_loop.max_epochs = 1 + (len(states) > 1)
            runner.fit(module, batches())
            states.append(plan.state_dict())
        return states

    plan = MixedPrecisionPlan("16-mixed")
    assert seen(plan, plan) == seen(MixedPrecisionPlan("16-mixed"), MixedPrecisionPlan("16-mixed"))


class Keeps(Regression):
    def __init__(self, plan: MixedPrecisionPlan, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_a_plan_among_hyperparameters_is_loaded_again(tmp_path: Path) -> None:
    plan = MixedPrecisionPlan("16-mixed", pins={"norms": "fp32"})
    module, logger = Keeps(plan), CSVLogger(tmp_path)
    run = fit(module, plugins=[plan], logger=logger)
    run.save_checkpoint(tmp_path / "kept.ckpt")
    loaded = Keeps.load_from_checkpoint(tmp_path / "kept.ckpt")
    assert loaded.hparams["plan"].policy == plan.policy
    written = Path(logger.log_dir, "hparams.yaml").read_text().splitlines()
    assert [line.split(":")[0] for line in written if line[0] not in " -"] == ["lr", "plan", "precision_plan"]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda kept: {**kept, "plugins": [copy.deepcopy(kept["plugins"][0])]}])
def test_the_counts_of_a_deep_copy_are_read_on_the_plan_that_was_copied(way: Any) -> None:
    plan = MixedPrecisionPlan("16-mixed")
    ran = fit(Regression(), **way({"plugins": [plan]})).precision_plugin
    assert ran is not plan
    assert (plan.applied_steps, plan.skipped_steps) == (ran.applied_steps, ran.skipped_steps)
    assert plan.applied_steps > 0
    fit(Regression(), plugins=[plan], max_steps=4)
    assert plan.applied_steps + plan.skipped_steps == 4
