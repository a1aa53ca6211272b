"""Complaint 6: non-finite steps are skipped within a budget, and the run that stops says where the value came from."""

from functools import partial
from typing import Any

import pytest
import torch

from lightning_mp import LossScaleError, LossScaling, NonFinite, NonFiniteError
from support.manual import Manual
from support.models import Regression, same_weights, weights
from support.nonfinite import Breaks
from support.oracles import MODES, SCALED, UNSCALED, plan_for
from support.running import fit
from support.traces import Trace, traced

every_mode = pytest.mark.parametrize("mode", MODES)
unscaled = pytest.mark.parametrize("mode", UNSCALED)
#: the scale can go nowhere, so that every skip counts against the budget, as without a scale
STUCK = LossScaling.static(64.0)
ALLOWED = 3


def sick(how: str, since: int = 2) -> Breaks:
    """Healthy until batch ``since``; then every one breaks in one of four ways."""
    return Breaks(how, tuple(range(since, 8)), partial(torch.optim.AdamW, lr=1e-3, eps=1e-4, fused=True))


#: how it breaks -> the module named, the parameter named, what else the message says
ORIGINS = {
    "weight": ("net.1", "net.1.weight", "non-finite already before it was scaled"),
    "gradient": ("net.2", None, "the loss was finite"),
    "batch": ("net.0", "net.0.weight", "the batch, as the input of that module"),
    "loss": ("net.4", None, "the loss, from finite outputs"),
}


def _stop(module: Regression, plan: Any, **options: Any) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        fit(module, plugins=[plan], **options)
    return caught.value


@pytest.mark.parametrize("how", ORIGINS)
@every_mode
def test_three_skips_are_allowed_and_the_fourth_stops_the_run_by_name(mode: str, how: str) -> None:
    since = 2
    module, plan = sick(how, since), plan_for(mode, STUCK, nonfinite=NonFinite(max_consecutive=ALLOWED))
    error = _stop(module, plan)
    expected, parameter, says = ORIGINS[how]
    assert (error.rank, error.step, error.module) == (0, since + ALLOWED, expected)
    if parameter is not None:
        assert error.parameter == parameter
    assert says in str(error)
    assert (plan.applied_steps, plan.skipped_steps) == (since, ALLOWED + 1)
    for word in ("Non-finite values", "Allowed:", expected, f"step {since + ALLOWED}", "rank 0"):
        assert word in str(error)


@pytest.mark.parametrize(
    ("steps", "allowed", "ends"),
    [("........", 0, None), (".x......", 0, 1), (".xx.xx..", 2, None), ("..xxx...", 2, 4), ("x.x.xxx.", 2, 6)],
)
def test_a_run_ends_on_the_step_that_exceeds_the_budget(steps: str, allowed: int, ends: int | None) -> None:
    bad = tuple(at for at, step in enumerate(steps) if step == "x")
    module, plan = Regression(overflow_at=bad), plan_for("32-true", nonfinite=NonFinite(max_consecutive=allowed))
    if ends is None:
        fit(module, plugins=[plan])
        assert (plan.applied_steps, plan.skipped_steps) == (8 - len(bad), len(bad))
    else:
        assert _stop(module, plan).step == ends


@pytest.mark.parametrize("at_min", ["raise", "hold"])
def test_an_overflow_at_the_floor_ends_a_run_whose_rule_says_so(at_min: Any) -> None:
    plan = plan_for("16-mixed", LossScaling.deepspeed(initial_scale_power=1, hysteresis=1, at_min=at_min))
    module = Regression(overflow_at=(0, 1))  # 2 → 1 → 1
    if at_min == "hold":
        fit(module, plugins=[plan])
        assert plan.applied_steps == 6
        return
    with pytest.raises(LossScaleError) as caught:
        fit(module, plugins=[plan])
    assert caught.value.step == 1


@pytest.mark.parametrize("how", ORIGINS)
@unscaled
def test_raise_stops_at_the_first(mode: str, how: str) -> None:
    plan = plan_for(mode, nonfinite="raise")
    error = _stop(sick(how), plan)
    assert (error.step, error.module) == (2, ORIGINS[how][0])
    assert (plan.applied_steps, plan.skipped_steps) == (2, 1)


@pytest.mark.parametrize("how", ["weight", "batch", "loss"])
@pytest.mark.parametrize("mode", SCALED)
def test_raise_with_scaling_stops_at_a_loss_that_is_bad_already(mode: str, how: str) -> None:
    """No scale can help there, so the scale's way down is not waited for."""
    error = _stop(sick(how), plan_for(mode, nonfinite="raise"))
    assert (error.step, error.module) == (2, ORIGINS[how][0])
    assert "no loss scale can help" in str(error)


@unscaled
def test_ignore_applies_what_came_as_stock_lightning_does(mode: str) -> None:
    plan = plan_for(mode, nonfinite="ignore")
    hosts = {"plugins": [plan]}, {"precision": mode}
    here, there = (traced(Regression(overflow_at=(3,)), **host) for host in hosts)
    assert (plan.applied_steps, plan.skipped_steps) == (8, 0)
    assert any(not torch.isfinite(value).all() for value in here.weights[-1].values())
    assert all(
        torch.equal(value, there.weights[-1][name]) or not torch.isfinite(value).all()
        for name, value in here.weights[-1].items()
    )


def test_manual_optimization_names_what_the_gradients_show() -> None:
    """The batch cannot be run again there: the gradients at hand are what is left to look at."""

    def way(m: Any, batch: Any, batch_idx: int) -> None:
        opt = m.optimizers()
        opt.zero_grad()
        m.manual_backward(m.loss(batch) * (float("inf") if batch_idx == 2 else 1.0))
        opt.step()

    error = _stop(Manual(way), plan_for("bf16-mixed", nonfinite="raise"))
    assert error.step == 2
    assert error.module == "net.3"


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed"])
def test_the_error_leaves_the_weights_as_they_were(mode: str) -> None:
    """The search for the origin runs the batch again; it must not step, and not leave the module in another state."""
    module = sick("gradient")
    trace = Trace()
    _stop(module, plan_for(mode, STUCK, nonfinite=NonFinite(max_consecutive=1)), callbacks=[trace])
    assert same_weights(trace.weights[-1], weights(module))
    assert not any(m._forward_hooks for m in module.modules())
