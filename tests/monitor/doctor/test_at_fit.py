"""What ``fit`` under a plan says by itself: one warning, of what is cheap and certain."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_mp import MixedPrecisionPlan
from lightning_mp.callbacks import EnableTF32, TrainingHealth, training_health
from lightning_mp.monitor.doctor.examine import warn_at_fit
from support import hf
from support.doctor import Wrapped, net
from support.language import Language, gpt2, tokens
from support.models import Regression, batches
from support.oracles import MODES, plan_for
from support.running import fit, trainer


def _warned(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(item.message) for item in caught if str(item.message).startswith("before the first step:")]


def _asleep() -> Regression:
    module = Regression()
    module.net.eval()
    return module


@pytest.mark.parametrize("mode", MODES)
def test_one_warning_names_code_and_command(mode: str) -> None:
    (text,) = _warned(lambda: fit(_asleep(), plugins=[plan_for(mode)]))
    assert "LMP003 eval_mode: " in text
    assert "self.net.train()" not in text.splitlines()[0]
    assert "'lightning-mp doctor CONFIG'" in text


def test_several_findings_share_the_warning() -> None:
    class Both(Language):
        def __init__(self) -> None:
            super().__init__(gpt2())
            self.model.gradient_checkpointing_enable()
            self.model.transformer.h[0].mlp.eval()

    (text,) = _warned(lambda: fit(Both(), data=tokens(), plugins=[MixedPrecisionPlan("bf16-mixed")]))
    assert "LMP003" in text
    assert "LMP005" in text


@pytest.mark.parametrize("mode", MODES)
def test_a_healthy_fit_says_nothing(mode: str) -> None:
    assert _warned(lambda: fit(Regression(), plugins=[plan_for(mode)])) == []


def test_validation_is_done_in_eval_mode_and_nothing_is_said() -> None:
    class Validated(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

    module = Validated()
    module.net.eval()
    runner = trainer(plugins=[MixedPrecisionPlan("bf16-mixed")])
    assert _warned(lambda: runner.validate(module, batches(), verbose=False)) == []


def test_what_costs_a_forward_pass_or_an_optimizer_is_not_asked() -> None:
    asked: list[str] = []

    class Counts(Wrapped):
        def configure_optimizers(self) -> Any:
            asked.append("optimizers")

    module = Counts(net())
    module.model[0].register_forward_hook(lambda *_: asked.append("forward"))
    warn_at_fit(module, MixedPrecisionPlan("16-true").policy)
    assert asked == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_takes_models_without_values(device: str) -> None:
    with torch.device(device):
        model: nn.Module = hf.gpt2()
    (text,) = _warned(lambda: warn_at_fit(model.eval(), MixedPrecisionPlan("bf16-mixed").policy))
    assert "eval_mode" in text


def test_training_health_tells_the_doctor_what_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that neither a strategy nor TF32 is advised to a run that has it."""
    told: list[tuple[Any, Any]] = []

    def doctor(model: Any, plan: Any, strategy: Any, arguments: Any, **_: Any) -> list[Any]:
        told.append((strategy, arguments))
        return []

    monkeypatch.setattr(training_health, "doctor", doctor)
    tf32 = EnableTF32()
    runner = fit(Regression(), callbacks=[TrainingHealth(tmp_path), tf32], accumulate_grad_batches=2)
    ((strategy, arguments),) = told
    assert strategy is runner.strategy
    assert tf32 in arguments.pop("callbacks")
    assert arguments == {"accumulate_grad_batches": 2, "devices": 1, "num_nodes": 1}
