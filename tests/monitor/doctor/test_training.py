"""A model left in eval mode, and one whose step raises."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from lightning_mp import MixedPrecisionPlan
from lightning_mp.cli import app
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
    assert "dropout, batch statistics" in finding.why
    assert found(Wrapped(loaded.train()), MixedPrecisionPlan("bf16-mixed")) == {}


def test_a_module_that_is_no_lightnings_own_is_named_model() -> None:
    finding = found(net().eval(), "32-true")["eval_mode"]
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


class Raises(Wrapped):
    """Needs what a Trainer's own hooks make, logs, and raises in its loss."""

    def __init__(self, how: str) -> None:
        super().__init__(net(), partial(torch.optim.SGD, lr=0.1))
        self.how = how

    def setup(self, stage: str) -> None:
        self.made = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.how == "its own":
            raise KeyError("no labels here")
        rows = batch[0][:, 1:] if self.how == "a layer's" else batch[0]
        return self.made(self.model(rows)).pow(2).mean()


@pytest.mark.parametrize("plan", [MixedPrecisionPlan("bf16-mixed"), "32-true"], ids=str)
@pytest.mark.parametrize(
    ("how", "said", "line"),
    [
        ("its own", "a step raises KeyError: 'no labels here'", 'raise KeyError("no labels here")'),
        ("a layer's", "a step raises RuntimeError: mat1 and mat2 shapes", "self.made(self.model(rows))"),
        ("not at all", None, ""),
    ],
)
def test_a_step_that_raises_is_named_with_the_users_own_line(how: str, said: str | None, line: str, plan: Any) -> None:
    module = Raises(how)
    finding = found(module, plan, batch=(torch.ones(4, 16), torch.ones(4, 8))).get("step_raises")
    assert not hasattr(module, "made")
    assert (finding is None) == (said is None)
    if finding is not None and said is not None:
        assert finding.what.startswith(said)
        assert (finding.where or "").startswith("test_training.py:")
        assert line in finding.why
        assert finding.severity == "error"


def test_on_the_command_line_it_is_the_first_batch_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {_target_: monitor.doctor.test_training.Raises, how: its own}\n"
        "data: {_target_: support.models.batches}\nplan: bf16-mixed\ntrainer: {accelerator: cpu}\n"
    )
    result = CliRunner().invoke(app, ["doctor", str(path)])
    assert result.exit_code == 2, result.output
    assert "LMP023 error step_raises  test_training.py:" in result.output
    assert "KeyError: 'no labels here'" in result.output
