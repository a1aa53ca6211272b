"""A model left in eval mode."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_mp import MixedPrecisionPlan
from support import hf
from support.doctor import Residual, Tagger, Wrapped, found, net, resnet


def test_a_model_that_from_pretrained_returned_is_in_eval_mode(tmp_path: object) -> None:
    from transformers import GPT2LMHeadModel

    hf.gpt2(dropout=0.1).save_pretrained(str(tmp_path))
    loaded = GPT2LMHeadModel.from_pretrained(str(tmp_path))
    finding = found(Wrapped(loaded), MixedPrecisionPlan("bf16-mixed"))["eval_mode"]
    assert finding.severity == "warning"
    assert finding.where == "model"
    assert finding.fix.startswith("call self.model.train() ")
    assert "7 dropouts without effect" in finding.why
    assert found(Wrapped(loaded.train()), MixedPrecisionPlan("bf16-mixed")) == {}


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (resnet, "5 norms on running statistics"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), "1 dropout without effect"),
        (net, "are off there"),
    ],
)
def test_it_says_what_eval_mode_changes(build: object, why: str) -> None:
    finding = found(build().eval(), "32-true")["eval_mode"]  # type: ignore[operator]
    assert why in finding.why
    assert finding.where is None
    assert finding.fix.startswith("call model.train() ")


def test_the_outermost_modules_in_eval_mode_are_named() -> None:
    model = resnet()
    model[2].eval()
    model[3].eval()
    finding = found(model, "32-true")["eval_mode"]
    assert finding.what.endswith(": 2, 3")


def test_a_frozen_part_and_a_frozen_norm_belong_in_eval_mode() -> None:
    model = resnet()
    model[2].eval().requires_grad_(False)
    model[1].eval()
    model[3].body[1].eval()
    assert isinstance(model[3], Residual)
    assert found(model, "32-true") == {}


def test_training_mode_is_healthy() -> None:
    assert found(Tagger(), "32-true") == {}
