"""What a ZeRO strategy refuses before the first step: every fault at once, both values shown, the module untouched."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lightning_mp import LossScaling, MissingExtraError, MixedPrecisionPlan, PlanError, make_strategy
from lightning_mp.strategies import registry
from support.models import Regression, same_weights, weights
from support.running import trainer

pytest.importorskip("deepspeed")


def _attach(
    module: LightningModule, plan: MixedPrecisionPlan, name: str = "deepspeed_zero2", **options: Any
) -> LightningModule:
    """The module as it is when the strategy hands it to the plan, in a run on two processes."""
    given = {key: options.pop(key) for key in ("config",) if key in options}
    # Without the plan: what a name does that is given to Trainer(strategy="mp_...").
    strategy: Any = registry.build(name, None, {"cluster_environment": LightningEnvironment(), **given})
    module.trainer = trainer(plugins=[plan], strategy=strategy, devices=2, **options)
    strategy.connect(module)
    return module


def _refused(module: LightningModule, plan: MixedPrecisionPlan, *arguments: Any, **options: Any) -> PlanError:
    before, kinds = weights(module), [type(m) for m in module.modules()]
    _attach(module, plan, *arguments, **options)
    with pytest.raises(PlanError) as caught:
        plan.convert_module(module)
    assert same_weights(before, weights(module))
    assert kinds == [type(m) for m in module.modules()]
    for fault in caught.value.faults:
        assert fault.problem
        assert fault.fix
    return caught.value


def _plan(mode: str = "16-mixed", **fields: Any) -> MixedPrecisionPlan:
    return MixedPrecisionPlan(mode, **fields)  # type: ignore[arg-type]


def test_faults_of_plan_json_and_trainer_come_together() -> None:
    config = {
        "fp16": {"enabled": True, "initial_scale_power": 12, "hystersis": 2},
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3},
    }
    plan = _plan(pins={"LayerNrom": "fp32"}, loss_scaling=LossScaling.deepspeed())
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    error = _refused(Regression(), plan, config=config, **options)
    said = str(error)
    assert len(error.faults) == 6
    for both in (
        ("'LayerNrom'", "'LayerNorm'"),
        ("initial_scale_power=12", "init_scale=65536"),
        ("fp16.hystersis", "'hysteresis'"),
        ("gradient_accumulation_steps=4", "accumulate_grad_batches=2"),
        ("gradient_clipping=1.0", "gradient_clip_val=0.5"),
        ("zero_optimization.stage=3", "stage=2"),
    ):
        assert all(word in said for word in both), both


def test_a_contradiction_with_the_plan_is_found_when_the_strategy_is_made(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"bf16": {"enabled": True}}), encoding="utf-8")
    for config in ({"bf16": {"enabled": True}}, path, str(path)):
        with pytest.raises(PlanError, match=r"bf16.enabled=True in the JSON and precision='16-mixed' in the plan"):
            make_strategy("deepspeed_zero2", _plan(), config=config)


def test_the_file_of_lightnings_variable_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"fp16": {"enabled": False}, "steps_per_print": 7}), encoding="utf-8")
    monkeypatch.setenv(DeepSpeedStrategy.DEEPSPEED_ENV_VAR, str(path))
    with pytest.raises(PlanError, match=r"fp16.enabled=False"):
        make_strategy("deepspeed_zero2", _plan())
    strategy: Any = make_strategy("deepspeed_zero2", _plan("bf16-mixed"))
    assert strategy.config["steps_per_print"] == 7
    assert strategy.config["zero_optimization"]["overlap_comm"] is True  # Lightning's own defaults stand below


def test_a_plan_without_a_loss_scale_of_its_own_runs_with_the_jsons() -> None:
    plan = _plan()
    plan.apply(_attach(Regression(), plan, config={"fp16": {"enabled": True, "loss_scale_window": 500}}))
    assert plan.policy.loss_scaling == plan.scaler.config == LossScaling.deepspeed(loss_scale_window=500)
    plan.apply(_attach(Regression(), plan))
    assert plan.policy.loss_scaling == LossScaling()
    plan.teardown()


class OwnBackward(Regression):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class Scalar(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(2.0))


class Renormed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, max_norm=1.0)


BY_VALUE = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}
#: module, the plan's options, strategy, the Trainer's options, what is said
CASES: list[tuple[type[Regression], dict[str, Any], str, dict[str, Any], str]] = [
    (Regression, {}, "zero2", BY_VALUE, "gradient_clip_algorithm='value'"),
    (OwnBackward, {}, "zero2", {}, "LightningModule.backward overridden"),
    (Scalar, {}, "zero1", {}, "'logit_scale', a parameter without a dimension"),
    (Renormed, {}, "zero3", {}, "'table' with max_norm=1"),
    (Regression, {"mode": "bf16-mixed", "nonfinite": "ignore"}, "zero2", {}, "nonfinite='ignore' with ZeRO"),
    (Regression, {"mode": "bf16-true"}, "zero3", {}, "'bf16-mixed'"),
    (Regression, {"mode": "16-true"}, "zero2_offload", {}, "'16-mixed'"),
    (Regression, {"mode": "bf16-true"}, "zero2_half", {}, "half_weights=True with precision='bf16-true'"),
    (Regression, {"mode": "32-true"}, "zero1_half", {}, "half_weights=True with precision='32-true'"),
]


@pytest.mark.parametrize(("kind", "plan", "name", "options", "said"), CASES)
def test_what_zero_cannot_do_is_refused(kind: Any, plan: dict[str, Any], name: str, options: Any, said: str) -> None:
    assert said in str(_refused(kind(), _plan(**plan), f"deepspeed_{name}", **options))


@pytest.mark.parametrize(("name", "said"), [("zero3", "stage=3"), ("zero2_offload", "offload_optimizer=True")])
def test_half_weights_beside_what_holds_none_are_refused(name: str, said: str) -> None:
    with pytest.raises(PlanError, match=f"half_weights=True with {said}"):
        make_strategy(f"deepspeed_{name}", _plan(), half_weights=True)


@pytest.mark.parametrize("name", ["deepspeed_zero3", "deepspeed_zero1_offload"])
def test_a_half_pin_on_trained_weights_is_refused_there_and_on_frozen_ones_is_not(name: str) -> None:
    error = _refused(Regression(), _plan("bf16-mixed", pins={"net.0": "bf16"}), name)
    assert "in 'net.0' to bf16" in str(error)
    frozen = Regression()
    frozen.net[0].requires_grad_(False)
    plan = _plan("bf16-mixed", pins={"net.0": "bf16"})
    plan.convert_module(_attach(frozen, plan, name))
    assert frozen.net[0].weight.dtype == torch.bfloat16
    plan.teardown()


def test_optimizers_that_evaluate_the_closure_are_refused() -> None:
    module, plan = Regression(), _plan("bf16-true", pins={"LayerNorm": "fp32"})
    plan.convert_module(_attach(module, plan))
    strategy: Any = module.trainer.strategy
    with pytest.raises(PlanError, match="LBFGS, which evaluates its closure again, with ZeRO"):
        strategy._setup_model_and_optimizer(module, torch.optim.LBFGS(module.parameters()))
    plan.teardown()


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingExtraError, match="pip install --no-build-isolation 'deepspeed"):
        make_strategy("deepspeed_zero2", MixedPrecisionPlan("16-mixed"))


def test_a_schedule_in_the_json_beside_one_in_the_module_is_refused() -> None:
    module, plan = Regression(), _plan()
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    composed = plan.apply(_attach(module, plan, config={"scheduler": scheduler}))
    strategy: Any = module.trainer.strategy
    strategy.config = composed  # as its setup does
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(PlanError, match=r"WarmupLR.* in the JSON and StepLR in configure_optimizers"):
        strategy._setup_model_and_optimizer(module, optimizer, schedule)
    plan.teardown()
