"""``auto`` chooses from the device and the model, says what and why, and chooses anew for another Trainer."""

from __future__ import annotations

import torch

from lightning_mp import LossScaling, MixedPrecisionPlan
from support.models import Regression, same_weights, weights
from support.running import fit
from support.traces import lightning_says


def test_a_small_model_on_a_cpu_runs_in_fp32_and_the_reason_is_logged() -> None:
    module, plan = Regression(), MixedPrecisionPlan("auto")
    assert plan.precision == "auto"
    with lightning_says() as lines:
        fit(module, plugins=[plan])
    assert plan.precision == plan.policy.precision == "32-true"
    said = [line for line in lines if "'auto' is '32-true'" in line]
    assert len(said) == 1
    assert "below 100M" in said[0]
    oracle = Regression()
    fit(oracle, precision="32-true")
    assert module.losses == oracle.losses
    assert same_weights(weights(module), weights(oracle))


def test_loss_scaling_declared_for_the_fp16_case_does_no_harm_where_it_is_not_chosen() -> None:
    plan = MixedPrecisionPlan("auto", loss_scaling=LossScaling(init_scale=64.0))
    fit(Regression(), plugins=[plan])
    assert plan.scaler is None
    assert plan.policy.loss_scaling is None


def test_pins_and_counts_work_under_auto() -> None:
    plan, module = MixedPrecisionPlan("auto", pins={"LayerNorm": "bf16"}), Regression(overflow_at=(3,))
    fit(module, plugins=[plan])
    assert module.net[1].weight.dtype == torch.bfloat16
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)


def test_a_checkpoint_remembers_that_it_was_auto() -> None:
    plan = MixedPrecisionPlan("auto")
    fit(Regression(), plugins=[plan])
    assert plan.state_dict()["policy"]["precision"] == "auto"


def test_another_trainer_asks_again() -> None:
    plan = MixedPrecisionPlan("auto")
    for _ in range(2):
        with lightning_says() as lines:
            fit(Regression(), plugins=[plan])
        assert any("'auto' is '32-true'" in line for line in lines)
