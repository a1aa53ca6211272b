"""Steps and backward passes that the plan does not make: as in stock, or refused; and what a step returns."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import SGD

from lightning_mp import PlanError
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


@pytest.mark.parametrize(("mode", "said"), [("bf16-mixed", ""), ("16-mixed", "the loss scale ended at 1")])
def test_a_run_that_applied_no_step_says_so_with_the_numbers(mode: str, said: str) -> None:
    module = Regression(overflow_at=tuple(range(8)))
    with pytest.warns(UserWarning, match=f"applied 0 of its 8 optimizer steps.*{said}"):
        fit(module, plugins=[plan_for(mode)])


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
