"""Loss scales that overflow at once, and sums over micro-batches that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling, MixedPrecisionPlan
from lightning_mp.policy.loss_scaling import FP32_MAX
from support import hf
from support.doctor import Wrapped, found, net
from support.models import batches
from support.running import fit

NAME = "scale_overflows_at_once"


def _plan(mode: str = "16-mixed", **scaling: Any) -> MixedPrecisionPlan:
    return MixedPrecisionPlan(mode, loss_scaling=LossScaling(**scaling))


# ------------------------------------------------------------------ by its size


@pytest.mark.parametrize(
    ("scaling", "severity", "said"),
    [
        ({"init_scale": 2.0**32}, "warning", "about 16 steps are skipped"),
        ({"init_scale": 2.0**32, "hysteresis": 2}, "warning", "about 17 steps are skipped"),
        ({"init_scale": 2.0**25}, "warning", "about 9 steps are skipped"),
        ({"init_scale": 2.0**32, "dynamic": False, "min_scale": 0.0}, "warning", "skipped forever"),
        ({"init_scale": 2.0**41, "dynamic": False, "min_scale": 0.0}, "error", "skipped forever"),
        ({"init_scale": 2.0**42, "min_scale": 2.0**41}, "error", "skipped forever"),
    ],
)
@pytest.mark.parametrize("mode", ["16-mixed", "16-true"])
def test_a_scale_no_gradient_fits_under(mode: str, scaling: Any, severity: str, said: str) -> None:
    finding = found(net(), _plan(mode, **scaling))[NAME]
    assert finding.severity == severity
    assert said in finding.why
    assert finding.where == "loss_scaling.init_scale"


@pytest.mark.parametrize("scaling", [{}, {"init_scale": 2.0**24}, {"init_scale": 2.0**15, "dynamic": False}])
def test_usual_scales_are_healthy(scaling: Any) -> None:
    assert found(net(), _plan(**scaling)) == {}
    assert found(net(), "16-mixed") == {}


# ------------------------------------------------------------------ by a real batch


def _plain(scale: float = 1.0) -> Wrapped:
    """Nothing in it asks for a Trainer; its loss is ``scale`` times the squared error."""

    class Squares(Wrapped):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx) * scale
            self.log("loss", loss)
            return loss

    torch.manual_seed(0)
    return Squares(net(), lambda p: torch.optim.SGD(p, lr=0.0))


@pytest.mark.parametrize("mode", ["16-mixed", "16-true"])
@pytest.mark.parametrize("exponent", [8, 18, 24, 40])
def test_a_batch_tells_how_many_steps_will_be_skipped(exponent: int, mode: str) -> None:
    module, plan, batch = _plain(), _plan(mode, init_scale=2.0**exponent), next(iter(batches()))
    findings = found(module, plan, batch=batch)
    same = DataLoader(TensorDataset(*(part.repeat(40, 1) for part in batch)), batch_size=8)
    fit(module, plugins=[plan], data=same)
    if plan.skipped_steps == 0:
        assert NAME not in findings
    else:
        assert findings[NAME].severity == ("info" if plan.skipped_steps <= 5 else "warning")
        assert f"about {plan.skipped_steps} steps are skipped" in findings[NAME].why


def test_a_batch_that_fits_outweighs_the_size_of_the_scale() -> None:
    plan, batch = _plan(init_scale=2.0**26), next(iter(batches()))
    assert found(_plain(2.0**-30), plan, batch=batch) == {}
    assert NAME in found(_plain(2.0**-30), plan)


def test_the_batch_leaves_the_model_as_it_is() -> None:
    module = _plain()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    found(module, _plan(init_scale=2.0**40), batch=next(iter(batches())))
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(parameter.grad is None and parameter.dtype is torch.float32 for parameter in module.parameters())


def test_under_a_floor_that_overflows_nothing_is_ever_trained() -> None:
    plan = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling.static(2.0**36))
    finding = found(_plain(), plan, batch=next(iter(batches())))[NAME]
    assert finding.severity == "error"
    assert "never falls below" in finding.why


def test_a_forward_pass_that_overflows_is_told_from_a_scale_that_does() -> None:
    module = _plain()
    with torch.no_grad():
        module.model[0].weight.mul_(1e6)
    finding = found(module, _plan(), batch=next(iter(batches())))[NAME]
    assert "in the forward pass" in finding.why


def test_a_plain_models_batch_may_be_its_keywords() -> None:
    batch = {"input_ids": hf.tokens(), "labels": hf.tokens()}
    assert found(hf.gpt2(), _plan(), batch=batch) == {}
    assert NAME in found(hf.gpt2(), _plan(init_scale=2.0**40), batch=batch)


def test_without_a_loss_the_batch_says_nothing() -> None:
    assert found(net(), _plan(), batch=(torch.ones(2, 16),)) == {}


# ------------------------------------------------------------------ accumulation


def _accumulated(mode: str, parts: int, model: nn.Module | None = None, **scaling: Any) -> Any:
    findings = found(
        model or Wrapped(net(), torch.optim.SGD), _plan(mode, **scaling), None, {"accumulate_grad_batches": parts}
    )
    return findings.get("accumulation_overflows")


@pytest.mark.parametrize(
    ("mode", "parts", "scaling", "entry"),
    [
        ("16-true", 8, {}, "1 or more"),
        ("16-true", 4, {"init_scale": 2.0**20}, "0.0625 or more"),
        ("16-mixed", 2, {"init_scale": FP32_MAX}, "1 or more"),
    ],
)
def test_a_sum_leaves_the_format_it_is_stored_in(mode: str, parts: int, scaling: Any, entry: str) -> None:
    finding = _accumulated(mode, parts, **scaling)
    assert finding.severity == "warning"
    assert entry in finding.why
    assert finding.where == "accumulate_grad_batches"


@pytest.mark.parametrize(
    ("mode", "parts", "scaling"),
    [
        ("16-true", 1, {}),
        ("16-true", 64, {"init_scale": 1024.0}),
        ("16-mixed", 64, {}),
        ("16-mixed", 2, {"init_scale": 2.0**24}),
    ],
)
def test_a_sum_that_fits_is_healthy(mode: str, parts: int, scaling: Any) -> None:
    assert _accumulated(mode, parts, **scaling) is None


def test_fp16_pins_store_fp16_gradients() -> None:
    plan = MixedPrecisionPlan("16-mixed", pins={"2": "fp16"})
    arguments = {"accumulate_grad_batches": 4}
    assert "accumulation_overflows" in found(Wrapped(net(), torch.optim.SGD), plan, None, arguments)


def test_without_lightning_nobody_may_divide_the_losses() -> None:
    finding = _accumulated("16-true", 16, model=net(), init_scale=2.0**13)
    assert finding.severity == "info"
    assert "not divided by 16" in finding.why


@pytest.mark.parametrize(("entry", "overflows"), [(0.9, False), (1.1, True)])
def test_the_sum_overflows_where_it_is_said_to(entry: float, overflows: bool) -> None:
    """Two halves that each fit, of a gradient that does not, at a scale of 65536."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    finite: list[bool] = []
    for _ in range(2):
        ((weight.float() * entry).sum() * 65536 / 2).backward()
        finite.append(bool(torch.isfinite(weight.grad)))
    assert finite == [True, not overflows]
