"""Steps and backward passes that the plan does not make: as in stock, or refused; and what a step returns."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightning_mp import NonFiniteError, PlanError
from lightning_mp.callbacks import TrainingHealth
from support.manual import Manual
from support.models import Regression, same_weights, weights
from support.oracles import SCALED, plan_for
from support.running import fit
from support.traces import Trace

PLAIN = partial(SGD, lr=1e-3)


def bare(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.loss(batch).backward()
    opt.step()


@pytest.mark.parametrize("mode", SCALED)
def test_a_bare_backward_under_a_loss_scale_is_refused_before_it_is_applied(mode: str) -> None:
    module, trace = Manual(bare), Trace()
    with pytest.raises(PlanError, match=r"a loss that was not scaled.*manual_backward"):
        fit(module, plugins=[plan_for(mode)], callbacks=[trace])
    assert same_weights(weights(module), trace.start)


class Raw(Regression):
    """Steps what the optimizer that Lightning hands over is wrapped around."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.trainer.optimizers[0].step(optimizer_closure)


def raw(m: Any, batch: Any, batch_idx: int) -> None:
    opt = m.optimizers()
    opt.zero_grad()
    m.manual_backward(m.loss(batch))
    opt.optimizer.step()


RAW: dict[str, Any] = {"optimizer_step": Raw, "by hand": partial(Manual, raw)}


@pytest.mark.parametrize("how", RAW)
@pytest.mark.parametrize("mode", SCALED)
def test_a_raw_step_under_a_loss_scale_is_refused(mode: str, how: str) -> None:
    module, trace = RAW[how](optimizer=PLAIN), Trace()
    with pytest.raises(PlanError, match=r"SGD\.step\(\) called on the optimizer inside of Lightning's"):
        fit(module, plugins=[plan_for(mode)], callbacks=[trace])
    assert same_weights(weights(module), trace.start)


@pytest.mark.parametrize(("mode", "steps", "said"), [("bf16-mixed", 1, ""), ("16-mixed", 8, "scale ended at 1\\.")])
def test_a_run_that_applied_no_step_ends_as_an_error(mode: str, steps: int, said: str, tmp_path: Path) -> None:
    module, plan = Regression(overflow_at=tuple(range(8))), plan_for(mode)
    health, numbers = TrainingHealth(tmp_path, alerts=False), weights(module)
    with pytest.raises(NonFiniteError, match=f"applied 0 of its {steps} optimizer steps.*{said}"):
        fit(module, plugins=[plan], callbacks=[health], max_steps=steps)
    about, page = json.loads((tmp_path / "run.json").read_text()), (tmp_path / "report.html").read_text()
    assert about["status"] == "failed"
    assert "applied 0 of its" in about["error"]
    assert "The run failed: </strong>NonFiniteError: The run applied 0 of its" in page
    assert plan.engine is None
    assert same_weights(weights(module), numbers)
    fit(Regression(), plugins=[plan])


def test_fp16_may_still_look_for_its_scale_when_a_run_ends() -> None:
    with pytest.warns(UserWarning, match="applied 0 of its 5 optimizer steps"):
        fit(Regression(overflow_at=tuple(range(5))), plugins=[plan_for("16-mixed")], max_steps=5)


class TestWhereAPlanDoesNotBelong:
    def test_among_the_callbacks(self) -> None:
        with pytest.raises(PlanError, match="Write Trainer"):
            fit(Regression(), callbacks=[plan_for("bf16-mixed")])

    def test_in_fabric(self) -> None:
        from lightning.fabric import Fabric

        fabric, net = Fabric(plugins=[plan_for("bf16-mixed")], accelerator="cpu"), torch.nn.Linear(2, 1)
        model, _ = fabric.setup(net, SGD(net.parameters(), lr=1.0))
        with pytest.raises(PlanError, match="Use a Trainer"):
            fabric.backward(model(torch.ones(1, 2)).sum())

    def test_outside_of_a_run(self) -> None:
        runner = fit(Regression(), plugins=[plan_for("bf16-mixed")])
        with pytest.raises(RuntimeError, match=r"trainer\.fit\(\.\.\.\) again"):
            runner.strategy.optimizer_step(runner.optimizers[0], lambda: None)
