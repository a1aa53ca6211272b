"""Bad input is refused before the first step, every fault in one error, and the module is as it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn

from lightning_mp import MixedPrecisionPlan, PlanError, doctor
from lightning_mp.compat.torch import cpu_has_lstm
from lightning_mp.numerics.dtypes import TORCH_DTYPES
from support.language import Language, gpt2, tokens
from support.models import Regression, same_weights, weights
from support.oracles import plan_for
from support.running import fit, trainer


def _snapshot(module: LightningModule) -> tuple[Any, ...]:
    return (
        weights(module),
        [type(m) for m in module.modules()],
        {name: p.dtype for name, p in module.named_parameters()},
        {name: id(p) for name, p in module.named_parameters()},
        [key for m in module.modules() for key in m.__dict__ if key.startswith("_lmp") or key == "lr_scheduler_step"],
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    )


def _refused(module: LightningModule, plan: MixedPrecisionPlan, data: Any = None, **options: Any) -> PlanError:
    """The error, after checking that nothing was trained and nothing was changed."""
    before = _snapshot(module)
    with pytest.raises(PlanError) as caught:
        fit(module, plugins=[plan], data=data, **options)
    after = _snapshot(module)
    assert same_weights(before[0], after[0])
    assert before[1:] == after[1:]
    assert module.losses == []
    for fault in caught.value.faults:
        assert str(fault) in str(caught.value)
        assert fault.problem
        assert fault.fix
    return caught.value


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_precision_beside_the_plan_is_refused_by_the_trainer(precision: str) -> None:
    with pytest.raises((ValueError, MisconfigurationException), match="precision"):
        trainer(plugins=[MixedPrecisionPlan("bf16-mixed")], precision=precision)


@pytest.mark.parametrize("mode", ["16-mixed", "16-true"])
def test_lbfgs_under_scaling_is_refused(mode: str) -> None:
    module = Regression(partial(torch.optim.LBFGS, lr=0.1))
    plan = MixedPrecisionPlan(mode, pins={"LayerNorm": "bf16"}, checkpointing="Linear")
    with pytest.raises(PlanError) as error:
        fit(module, plugins=[plan])
    assert module.losses == []
    for word in ("LBFGS", repr(mode), "bf16-mixed", "32-true"):
        assert word in str(error.value)


def test_all_faults_of_a_plan_are_reported_together() -> None:
    plan = MixedPrecisionPlan(
        "bf16-true",
        pins={"lm_haed": "fp32", "*nrom*": "fp32", "lm_head": "fp32", "wte": "bf16"},
        checkpointing="GPT2Blokc",
    )
    error = _refused(Language(gpt2()), plan, tokens())
    assert len(error.faults) == 4
    given = " ".join(fault.problem for fault in error.faults)
    for word in ("'lm_haed'", "'*nrom*'", "'GPT2Blokc'", "tied"):
        assert word in given
    assert "'lm_head'" in str(error)  # the nearest names
    assert "'GPT2Block'" in str(error)


@pytest.mark.parametrize("mode", ["16-mixed", "16-true"])
def test_an_optimizer_that_turns_out_to_evaluate_its_closure_is_refused_by_name(mode: str) -> None:
    """SAM and its kind take ``closure=None`` and call it all the same: only the call itself shows it."""

    class Sharp(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            first = closure()
            super().step()
            closure()
            return first

    with pytest.raises(PlanError, match="which evaluates its closure again, with precision="):
        fit(Regression(partial(Sharp, lr=1e-3)), plugins=[plan_for(mode)])


class Recurrent(Regression):
    """The regression on what an LSTM makes of its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss((self.lstm(batch[0].unsqueeze(1))[0].squeeze(1), batch[1]))


@pytest.mark.parametrize("half", ["16", "bf16"])
def test_an_lstm_under_autocast_is_refused_where_onednn_has_none(
    half: str,
) -> None:
    """With the pin that helps."""
    mixed, name = f"{half}-mixed", "fp16" if half == "16" else half
    if cpu_has_lstm(TORCH_DTYPES[name]):
        assert fit(Recurrent(), plugins=[MixedPrecisionPlan(mixed)]).state.finished
        return
    assert "pins={'LSTM': 'fp32'}" in str(_refused(Recurrent(), MixedPrecisionPlan(mixed)))
    (finding,) = [found for found in doctor(Recurrent(), MixedPrecisionPlan(mixed)) if found.severity == "error"]
    assert finding.name == "precision_refused"
    assert "pins={'LSTM': 'fp32'}" in finding.fix
    pinned = [MixedPrecisionPlan(mixed, pins={"LSTM": dtype}) for dtype in ("fp32", name)]
    assert not [found for plan in pinned for found in doctor(Recurrent(), plan) if found.severity == "error"]
    plans = (*pinned, MixedPrecisionPlan(f"{half}-true"))
    assert all(fit(Recurrent(), plugins=[plan]).state.finished for plan in plans)
