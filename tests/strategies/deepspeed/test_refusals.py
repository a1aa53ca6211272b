"""What a ZeRO strategy refuses before the first step: every fault at once, both values shown, the module untouched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

from lightning_mp import LossScaling, MixedPrecisionPlan, PlanError, make_strategy
from lightning_mp.compat.deepspeed import casts_left_out
from lightning_mp.strategies import registry
from lightning_mp.strategies.deepspeed.forward import InsideEngine
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
        assert fault.given
        assert fault.allowed
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


def test_the_file_that_lightnings_variable_names_is_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"fp16": {"enabled": False}, "steps_per_print": 7}), encoding="utf-8")
    monkeypatch.setenv(DeepSpeedStrategy.DEEPSPEED_ENV_VAR, str(path))
    with pytest.raises(PlanError, match=r"fp16.enabled=False"):
        make_strategy("deepspeed_zero2", _plan())
    strategy: Any = make_strategy("deepspeed_zero2", _plan("bf16-mixed"))
    assert strategy.config["steps_per_print"] == 7
    assert strategy.config["zero_optimization"]["overlap_comm"] is True  # Lightning's own defaults stand below


def test_the_users_mapping_is_left_as_it_was() -> None:
    config = {"gradient_clipping": 1.0, "zero_optimization": {"overlap_comm": False}}
    module = _attach(Regression(), plan := _plan(), config=config, accumulate_grad_batches=2)
    merged = plan.apply(module)
    assert config == {"gradient_clipping": 1.0, "zero_optimization": {"overlap_comm": False}}
    assert (merged["gradient_clipping"], merged["gradient_accumulation_steps"]) == (1.0, 2)
    assert merged["zero_optimization"]["overlap_comm"] is False
    assert merged["communication_data_type"] == "fp32"
    assert merged["bf16"] == merged["torch_autocast"] == {"enabled": False}


def test_a_plan_without_a_loss_scale_of_its_own_runs_with_the_jsons() -> None:
    plan = _plan()
    plan.apply(_attach(Regression(), plan, config={"fp16": {"enabled": True, "loss_scale_window": 500}}))
    assert plan.policy.loss_scaling == plan.scaler.config == LossScaling.deepspeed(loss_scale_window=500)
    plan.apply(_attach(Regression(), plan))
    assert plan.policy.loss_scaling == LossScaling()


def test_clipping_by_value_is_refused() -> None:
    error = _refused(Regression(), _plan(), gradient_clip_val=1.0, gradient_clip_algorithm="value")
    assert "gradient_clip_algorithm='value'" in str(error)
    assert "'norm'" in str(error)


def test_a_backward_of_the_users_own_is_refused() -> None:
    class Own(Regression):
        def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
            loss.backward()

    assert "LightningModule.backward overridden" in str(_refused(Own(), _plan()))


@pytest.mark.parametrize("name", ["deepspeed_zero1", "deepspeed_zero3"])
def test_a_parameter_without_a_dimension_is_refused_by_name(name: str) -> None:
    module = Regression()
    module.logit_scale = nn.Parameter(torch.tensor(2.0))
    said = str(_refused(module, _plan(), name))
    assert "'logit_scale', a parameter without a dimension" in said
    assert "view(1)" in said


def test_an_embedding_whose_forward_changes_its_rows_is_refused_where_it_is_gathered() -> None:
    module = Regression()
    module.table = nn.Embedding(4, 2, max_norm=1.0)
    assert "'table' with max_norm=1" in str(_refused(module, _plan(), "deepspeed_zero3"))
    plan = _plan()
    plan.apply(_attach(module, plan, "deepspeed_zero2"))


def test_ignoring_non_finite_values_is_refused() -> None:
    assert "nonfinite='ignore' with ZeRO" in str(_refused(Regression(), _plan("bf16-mixed", nonfinite="ignore")))


@pytest.mark.parametrize("name", ["deepspeed_zero3", "deepspeed_zero2_offload", "deepspeed_zero3_offload"])
@pytest.mark.parametrize("mode", ["bf16-true", "16-true"])
def test_half_storage_where_fp32_masters_are_kept_is_refused(name: str, mode: str) -> None:
    error = _refused(Regression(), _plan(mode), name)
    assert repr(mode) in str(error)
    assert repr(mode.replace("true", "mixed")) in str(error)


@pytest.mark.parametrize("name", ["deepspeed_zero3", "deepspeed_zero1_offload"])
def test_a_half_pin_on_trained_weights_is_refused_there_and_on_frozen_ones_is_not(name: str) -> None:
    error = _refused(Regression(), _plan("bf16-mixed", pins={"net.0": "bf16"}), name)
    assert "pin 'net.0' to bf16" in str(error)
    frozen = Regression()
    frozen.net[0].requires_grad_(False)
    plan = _plan("bf16-mixed", pins={"net.0": "bf16"})
    plan.convert_module(_attach(frozen, plan, name))
    assert frozen.net[0].weight.dtype == torch.bfloat16


def test_optimizers_that_evaluate_the_closure_are_refused_and_the_module_is_brought_back() -> None:
    module, plan = Regression(), _plan("bf16-true", pins={"LayerNorm": "fp32"})
    before, kinds = weights(module), [type(m) for m in module.modules()]
    plan.convert_module(_attach(module, plan))
    assert module.net[0].weight.dtype == torch.bfloat16
    strategy: Any = module.trainer.strategy
    with pytest.raises(PlanError, match="LBFGS, which evaluates its closure again, with ZeRO"):
        strategy._setup_model_and_optimizer(module, torch.optim.LBFGS(module.parameters()))
    assert same_weights(before, weights(module))
    assert kinds == [type(m) for m in module.modules()]


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


def test_a_model_made_in_configure_model_needs_a_precision_under_stage_3() -> None:
    module = _attach(Regression(), _plan("auto"), "deepspeed_zero3")
    strategy: Any = module.trainer.strategy
    with pytest.raises(PlanError, match=r"precision='auto' with configure_model"), strategy.model_sharded_context():
        pass


def test_zero_without_zero_is_refused() -> None:
    with pytest.raises(PlanError, match=r"zero_optimization=False with stage=2"):
        make_strategy("deepspeed_zero2", _plan(), zero_optimization=False)


@pytest.mark.parametrize(("stage", "name"), [(1, "mp_deepspeed_zero1"), (2, "mp_deepspeed_zero2")])
def test_stock_deepspeed_is_refused_with_the_name_of_ours(stage: int, name: str) -> None:
    module, plan = Regression(), _plan()
    strategy = DeepSpeedStrategy(stage=stage, cluster_environment=LightningEnvironment())
    module.trainer = trainer(plugins=[plan], strategy=strategy, devices=2)
    with pytest.raises(PlanError, match=repr(name)):
        plan.convert_module(module)


def test_the_casts_of_deepspeed_are_back_after_a_failure() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = DeepSpeedEngine._cast_module_mixed_precision

    def fails() -> None:
        with casts_left_out():
            assert DeepSpeedEngine._cast_module_mixed_precision is not own
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert DeepSpeedEngine._cast_module_mixed_precision is own


def test_torchs_linear_is_back_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed.runtime.zero.linear import zero3_linear_wrap

    module = _attach(Regression(), _plan(), "deepspeed_zero3")
    strategy: Any = module.trainer.strategy
    own = nn.functional.linear
    strategy._linear.remember()
    monkeypatch.setattr(nn.functional, "linear", zero3_linear_wrap)  # as stage 3 does, before something fails
    strategy.teardown()
    assert nn.functional.linear is own


class _Wrapper(nn.Module):
    """A DeepSpeedEngine as far as a step is concerned: autocast is off inside."""

    def __init__(self, module: nn.Module, fails: bool = False) -> None:
        super().__init__()
        self.module, self.fails = module, fails

    def forward(self, *args: Any) -> Any:
        if self.fails:
            raise KeyError
        with torch.autocast("cpu", enabled=False):
            return self.module(*args)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_step_runs_in_the_plans_context_inside_the_engine(own: bool, fails: bool) -> None:
    """And the module's forward, the user's own on the instance included, is back before it and after a failure."""

    class Asks(Regression):
        def validation_step(self, x: Any) -> Any:
            return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), self(x)

        def forward(self, x: Any) -> Any:
            return "class"

    module = Asks()
    if own:
        module.forward = lambda x: "instance"  # type: ignore[method-assign]
    before = dict(module.__dict__)
    redirect = InsideEngine(_plan())
    if fails:
        with pytest.raises(KeyError):
            redirect(_Wrapper(module, fails=True), module, "validation_step", 1)
    else:
        found = redirect(_Wrapper(module), module, "validation_step", 1)
        assert found == (True, torch.float16, "instance" if own else "class")
    assert module.__dict__ == before


def test_without_deepspeed_the_extra_is_named() -> None:
    code = """
import sys
sys.modules["deepspeed"] = None
from lightning_mp import MissingExtraError, MixedPrecisionPlan, make_strategy
try:
    make_strategy("deepspeed_zero2", MixedPrecisionPlan("16-mixed"))
except MissingExtraError as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert "pip install 'lightning-mp[deepspeed]'" in ran.stdout
