"""``auto`` chooses from the device and the model, says what and why, and chooses anew for another Trainer."""

from __future__ import annotations

from lightning_mp import MixedPrecisionPlan
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


def test_a_checkpoint_remembers_that_it_was_auto() -> None:
    plan = MixedPrecisionPlan("auto")
    fit(Regression(), plugins=[plan])
    assert plan.state_dict()["policy"]["precision"] == "auto"
