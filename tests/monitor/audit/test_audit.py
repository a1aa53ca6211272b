"""``audit``: of a bare module, of one batch through it, and of a Trainer while it runs and afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_mp import MixedPrecisionPlan, PlanError
from lightning_mp.callbacks import DtypePinning
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.monitor.audit import AuditReport, audit
from support.models import Regression, same_weights, weights
from support.oracles import MODES, plan_for, stock_for
from support.pinning import pin
from support.running import fit, trainer


def _rows(report: AuditReport) -> dict[str, Any]:
    return {row.module: row for row in report.rows}


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))


# ---------------------------------------------------------------------- a bare module


def test_a_bare_module_shows_what_it_has() -> None:
    net = _net()
    net[0].half()
    net[3](torch.randn(2, 8)).sum().backward()
    found = _rows(audit(net))
    assert {name: (row.param, row.grad, row.compute, row.ok) for name, row in found.items()} == {
        "0": ("fp16", None, None, True),  # nothing declares otherwise
        "1": ("fp32", None, None, True),
        "3": ("fp32", "fp32", None, True),
    }


def test_a_pin_that_was_lost_shows_without_a_plan() -> None:
    net = pin(_net(), {"BatchNorm1d": "fp32"})
    assert audit(net.to(torch.bfloat16)).ok  # the pin holds
    net[1].weight.data = net[1].weight.data.bfloat16()
    assert [row.module for row in audit(net).rows if not row.ok] == ["1"]


def test_an_optimizer_shows_its_state() -> None:
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    for given in (optimizer, [optimizer]):
        assert {row.optimizer_state for row in audit(net, optimizer=given).rows} == {"fp32"}
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    report = audit(net, plan="32-true", optimizer=optimizer)
    assert {(row.optimizer_state, row.ok) for row in report.rows} == {("bf16, fp32", False)}


@pytest.mark.parametrize("mode", MODES)
def test_one_batch_goes_through_as_the_plan_has_it(mode: Any) -> None:
    plan = plan_for(mode, pins={"BatchNorm1d": "fp32"})
    net = plan.convert_module(_net())
    report = audit(net, plan=plan, batch=torch.randn(4, 8))
    assert report.ok, report
    found = _rows(report)
    policy = plan.policy
    assert (found["0"].declared, found["0"].compute) == (policy.compute_dtype, policy.compute_dtype)
    assert (found["1"].declared, found["1"].compute, found["1"].grad) == ("fp32", "fp32", "fp32")
    assert found["3"].grad == policy.storage_dtype


def test_a_plan_that_was_not_applied_shows() -> None:
    report = audit(_net(), plan=MixedPrecisionPlan("bf16-true", pins={"BatchNorm1d": "fp32"}))
    assert [(row.module, row.ok) for row in report.rows] == [("0", False), ("1", True), ("3", False)]
    report = audit(_net(), plan=MixedPrecisionPlan("bf16-mixed", pins={"3": "fp32"}), batch=torch.randn(4, 8))
    assert [difference.reason[:23] for row in report.rows for difference in row.differences] == [
        "the pin is not in force"
    ]


def test_the_module_is_as_before() -> None:
    net, x = _net(), torch.randn(4, 8)
    net(x).sum().backward()
    before, gradients = weights(net), [parameter.grad for parameter in net.parameters()]
    copies = [gradient.clone() for gradient in gradients if gradient is not None]
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    random = torch.get_rng_state()
    audit(net, plan="bf16-mixed", batch=x)
    assert same_weights(weights(net), before)
    assert all(parameter.grad is gradient for parameter, gradient in zip(net.parameters(), gradients, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(gradients, copies, strict=True) if one is not None)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in net.named_buffers())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    assert not torch.is_autocast_enabled("cpu")


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        return {"out": self.layer(x) * scale, "ids": torch.arange(2)}


@pytest.mark.parametrize("batch", [torch.ones(4, 8), (torch.ones(4, 8),), [torch.ones(4, 8)], {"x": torch.ones(4, 8)}])
def test_batches_however_they_come(batch: Any) -> None:
    (row,) = audit(_Two(), plan="bf16-mixed", batch=batch).rows
    assert (row.compute, row.grad) == ("bf16", "fp32")


# ---------------------------------------------------------------------- a run


class Asks(Callback):
    """Audits in the middle of a run."""

    def __init__(self) -> None:
        self.reports: list[AuditReport] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.reports.append(audit(trainer))
        self.reports.append(audit(pl_module))


@pytest.mark.parametrize("how", ["plan", "stock"])
@pytest.mark.parametrize("mode", MODES)
def test_a_run_while_it_lasts_and_afterwards(mode: str, how: str) -> None:
    asks = Asks()
    stock = {"precision": "16-true"} if mode == "16-true" else stock_for(mode)
    precision = {"plugins": [plan_for(mode)]} if how == "plan" else stock
    module = Regression(lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4))
    runner = fit(module, callbacks=[asks], max_steps=2, **precision)
    storage = "fp32" if mode.endswith("mixed") else plan_for(mode).policy.storage_dtype
    for report in (*asks.reports, audit(runner), audit(module)):
        assert report.ok, report
        assert {(row.param, row.optimizer_state) for row in report.rows} == {(storage, storage)}
        assert report.rows[0].compute is None
        assert "nothing was run" in report.notes[-1]


def test_what_a_callback_saw_is_told_along(tmp_path: Any) -> None:
    callback = PrecisionAudit(run_dir=tmp_path)
    runner = fit(Regression(), plugins=[plan_for("bf16-mixed", pins={"net.3": "fp32"})], callbacks=[callback])
    report = audit(runner)
    assert [(row.input, row.compute) for row in report.rows] == [(row.input, row.compute) for row in callback.rows]
    assert report.where == "cpu, after 8 steps"
    runner.lightning_module.net[0].half()
    (wrong,) = (row for row in audit(runner).rows if not row.ok)
    assert (wrong.module, wrong.param, wrong.compute) == ("net.0", "fp16", "bf16")


def test_pins_given_back_since_are_no_difference(tmp_path: Any) -> None:
    pinning, callback = DtypePinning({"net.0": "bf16"}), PrecisionAudit(on_mismatch="raise", run_dir=tmp_path)
    runner = fit(Regression(), precision="bf16-mixed", callbacks=[pinning, callback])
    assert (callback.rows[0].param, callback.rows[0].optimizer_state) == ("bf16", "bf16")
    later = audit(runner)
    assert later.ok, later
    assert (later.rows[0].param, later.rows[0].compute) == ("fp32", None)


def test_a_trainer_without_a_module_is_refused() -> None:
    with pytest.raises(PlanError, match="a Trainer without a module"):
        audit(trainer())


def test_a_trainer_decides_for_itself() -> None:
    runner = fit(Regression(), precision="32-true")
    with pytest.raises(PlanError, match="a Trainer with plan="):
        audit(runner, plan="bf16-mixed")
    module = runner.lightning_module
    found = _rows(audit(module, plan="bf16-true"))  # of the module alone
    assert not found["net.0"].ok
