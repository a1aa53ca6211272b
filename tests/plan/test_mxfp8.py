"""MXFP8: a power of two as scale for each 32 numbers, against a hand-written oracle, and as every other recipe."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import FP8, Checkpointing, MixedPrecisionPlan, PlanError
from lightning_mp.compat import torchao
from lightning_mp.errors import Faults
from lightning_mp.modules import fp8
from lightning_mp.plan import for_strategy
from lightning_mp.policy import hardware
from support.fp8 import Across, Language, Plain, plan, run
from support.models import same_weights, weights
from support.ranks import Ranks

pytest.importorskip("torchao")
RECIPES = ("mxfp8", "mxfp8_gw_hp")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def _rounded(values: Tensor) -> Tensor:
    """Each 32 numbers of a row by 2**-ceil(log2(amax / 448)) to E4M3, and back."""
    blocks = values.double().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-118) / 448)))
    return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


@every_recipe
@pytest.mark.parametrize("rows", [(64,), (2, 16), (3, 7)], ids=str)
def test_a_product_and_its_gradients_are_those_of_the_rounded_numbers(recipe: str, rows: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(64, 96)
    x = torch.randn(*rows, 64, requires_grad=True)
    conversion = fp8.Conversion(nn.Sequential(layer), FP8(recipe=recipe, small="convert"), [], Faults())
    conversion.apply(torch.bfloat16, "cpu")
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    gradient = torch.randn_like(output)
    output.backward(gradient)
    given = x.detach().bfloat16().reshape(-1, 64)
    weight, g = layer.weight.detach().bfloat16(), gradient.reshape(-1, 96)
    of_tokens = -len(g) % 32
    padded, g_padded = (nn.functional.pad(one, (0, 0, 0, of_tokens)) for one in (given, g))
    expected = {
        "output": _rounded(given) @ _rounded(weight).t() + layer.bias.detach().bfloat16().double(),
        "input": _rounded(g) @ _rounded(weight.t().contiguous()).t(),
        "weight": g.double().t() @ given.double()
        if recipe.endswith("gw_hp")
        else _rounded(g_padded.t().contiguous()) @ _rounded(padded.t().contiguous()).t(),
    }
    assert x.grad is not None
    assert layer.weight.grad is not None
    found = {"output": output.detach().reshape(-1, 96), "input": x.grad.reshape(-1, 64), "weight": layer.weight.grad}
    for name, value in expected.items():
        off = (found[name].double() - value).norm() / value.norm()
        assert off < 2 * 2.0**-8, name  # products are exact in fp32; sum, bias and result are rounded to bf16


@every_recipe
def test_a_run_differs_from_bf16_by_rounding_and_is_the_same_recomputed(recipe: str) -> None:
    module, recomputed, bf16 = Language(), Language(), Language()
    run(module, plan(recipe))
    run(recomputed, plan(recipe, checkpointing=Checkpointing(modules="Block")))
    run(bf16, MixedPrecisionPlan("bf16-mixed"))
    assert module.losses == recomputed.losses
    assert same_weights(weights(module), weights(recomputed))
    assert module.losses != bf16.losses
    assert module.losses == pytest.approx(bf16.losses, rel=2e-2)


@every_recipe
def test_a_step_that_is_not_finite_is_skipped(recipe: str) -> None:
    class Spoilt(Language):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) * (float("nan") if batch_idx == 3 else 1.0)

    module, made = Spoilt(), plan(recipe)
    run(module, made)
    assert made.skipped_steps == 1
    assert all(bool(parameter.isfinite().all()) for parameter in module.parameters())


def test_a_dimension_that_is_no_multiple_of_32_is_left_out_as_shape() -> None:
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64), nn.Linear(64, 32))
    for recipe, reasons in (("mxfp8", ["shape", "shape", None]), ("rowwise", [None, None, None])):
        layers, _ = fp8.select(model, FP8(recipe=recipe, small="convert"), [], Faults())
        assert [layer.reason for layer in layers] == reasons
    faults = Faults()
    fp8.select(model[:2], FP8(recipe="mxfp8", small="convert"), [], faults)
    assert "a multiple of 32" in str(PlanError(faults.found))


def test_where_it_is_emulated_one_line_says_so_and_no_gpu_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        run(Language(), plan("mxfp8"))
    assert sum("is for checking, not for speed" in record.getMessage() for record in caplog.records) == 1
    old = hardware.Device("cuda", "NVIDIA A100", (8, 0))
    assert hardware.refusal(old, "fp8-mixed", emulate=FP8(recipe="mxfp8").anywhere) is None
    assert hardware.refusal(old, "fp8-mixed", emulate=FP8().anywhere) is not None


@pytest.mark.parametrize("capability", [(9, 0), (12, 0)])
def test_on_a_gpu_that_has_none_the_line_says_which_one_has(
    capability: tuple[int, int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torchao, "_has_mx_kernels", torchao._has_mx_kernels.__wrapped__)
    with caplog.at_level(logging.INFO):
        for_strategy.switch_tf32(plan("mxfp8").policy, hardware.Device("cuda", "NVIDIA X", capability))
    assert "MXFP8 needs compute capability 10.0 (not 12.0)" in caplog.text


@pytest.mark.gloo
def test_ddp_and_fsdp2_are_one_device(ranks: Ranks) -> None:
    whole = ranks.run(Across("ddp", "mxfp8", alike=True))[0]
    assert whole["losses"] == run(Plain(), plan("mxfp8")).losses
    sharded = ranks.run(Across("fsdp2", "mxfp8", alike=True, options={"wrap": "Block"}))[0]
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-5)
