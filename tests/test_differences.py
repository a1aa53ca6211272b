"""The first module that computes something else: a cast is planted, and found by its name; a healthy model has none."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from conformance.families import FAMILIES
from lightning_mp import MixedPrecisionPlan, PlanError, first_difference
from lightning_mp.cli import app
from support import hf
from support.cells import WHOLE
from support.comparing import same


class Fp8UnderAutocast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn).to(x.dtype) if torch.is_autocast_enabled("cpu") else x * 1


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        large = x + 100
        return large - large.mean(-1, keepdim=True)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (1.0 if grads[0].dtype == torch.float32 else 1.1)


class WrongBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Backward.apply(x)


class HalfWhereCompiled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16().float() if torch.compiler.is_compiling() else x * 1


def around(inner: nn.Module) -> nn.Module:
    """``inner`` as module "2" between ordinary layers."""
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), inner, nn.LayerNorm(64), nn.Linear(64, 8))


#: the module, the two plans, the backend; the pass that differs first, the operator and the dtypes
PLANTED = {
    "a cast": (Fp8UnderAutocast, "32-true", "bf16-mixed", "", "forward", "_to_copy", ("fp32", "fp8")),
    "a cast in fp16": (Fp8UnderAutocast, "bf16-true", "16-mixed", "", "forward", "_to_copy", ("bf16", "fp8")),
    "a mean in half precision": (Centred, "32-true", "bf16-mixed", "", "forward", "add", ("fp32", "bf16")),
    "a gradient": (WrongBackward, "32-true", "bf16-mixed", "", "backward", "mul", ("fp32", "bf16")),
    "a cast where compiled": (HalfWhereCompiled, "32-true", "32-true", "aot_eager", "forward", "compiled", ("", "")),
}


@pytest.mark.parametrize("case", PLANTED)
def test_what_is_planted_is_the_first_difference(case: str) -> None:
    inner, a, b, backend, part, operator, dtypes = PLANTED[case]
    found = first_difference(around(inner()), torch.randn(16, 32), a, b, compile=backend)
    first = found.rows[0]
    assert (first.module, first.kind, first.part, first.dtypes) == ("2", inner.__name__, part, dtypes)
    assert operator in first.operator
    assert {row.module for row in found.rows} == {"2"}
    assert f"The first difference is in the {part} pass of '2' ({inner.__name__})" in str(found)


#: the other plan and the backend, by model; to compile every module of a network takes long
HEALTHY = [
    pytest.param(model, *other, marks=WHOLE if other[1] and model != "gpt2" else [])
    for other in (("bf16-mixed", ""), ("16-mixed", ""), ("bf16-true", ""), ("32-true", "eager"))
    for model in ("gpt2", "llama", "resnet", "convnext")
]


@pytest.mark.parametrize(("model", "b", "backend"), HEALTHY)
def test_a_healthy_model_has_none(model: str, b: str, backend: str) -> None:
    family = FAMILIES[model]
    batch = family.batch(torch.Generator())
    batch.pop("attention_mask", None)
    found = first_difference(family.model(), batch, "32-true", b, compile=backend)
    assert found.rows == ()
    assert found.left_out == {}
    assert found.compared > 15
    assert "no module differs by more than its format explains" in str(found)


def test_a_pin_that_changes_nothing_is_no_difference_and_the_module_is_untouched() -> None:
    module = around(dropout := nn.Dropout(0.5))
    before, drawn = {name: one.clone() for name, one in module.state_dict().items()}, torch.get_rng_state()
    plans = MixedPrecisionPlan("bf16-mixed"), MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"})
    assert first_difference(module, torch.randn(16, 32, generator=torch.Generator()), *plans).rows == ()
    assert same(module.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert dropout.training


def test_what_cannot_be_compared_is_refused() -> None:
    module = around(nn.Identity())
    with pytest.raises(PlanError, match="Two equal plans"):
        first_difference(module, torch.randn(2, 32), "bf16-mixed", "bf16-mixed")
    with pytest.raises(PlanError, match="'auto'"):
        first_difference(module, torch.randn(2, 32), "auto", "bf16-mixed")


def test_the_command_prints_it(tmp_path: Any) -> None:
    run = ("diff", "experiment=llama_tiny", "trainer.accelerator=cpu", f"run_dir={tmp_path}")
    result = CliRunner().invoke(app, [*run, "--plans", "fp32,bf16-mixed"])
    assert result.exit_code == 0, result.output
    assert "no module differs by more than its format explains" in result.stdout
    result = CliRunner().invoke(app, [*run, "--plans", "fp32,bf16-true", "--json"])
    assert json.loads(result.stdout)["rows"] == []
    assert CliRunner().invoke(app, [*run, "--plans", "fp32,bf16,fp16"]).exit_code == 2


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = hf.llama(attn_implementation="eager")

    def forward(self, ids: Tensor) -> Tensor:
        mask = (torch.arange(ids.shape[1]) >= 2).long().expand_as(ids)
        return self.model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss


def test_the_mask_of_rows_that_attend_to_nothing_is_none() -> None:
    """Its lowest number of fp32 is below bf16's."""
    ids = torch.randint(hf.VOCABULARY, (2, hf.LENGTH))
    assert not first_difference(Padded(), ids, "32-true", "bf16-true").rows
