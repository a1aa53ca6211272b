"""``fp8-mixed`` on one device: what is computed, when, and that nothing of it stays."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import FP8, Checkpointing, MixedPrecisionPlan, PlanError
from lightning_mp.errors import Faults
from lightning_mp.modules import fp8
from lightning_mp.policy import hardware
from support.fp8 import RECIPES, WIDTH, Across, Language, Plain, plan, products, run, same, texts
from support.models import same_weights, weights
from support.ranks import Ranks
from support.running import trainer

torchao = pytest.importorskip("torchao")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
CONVERTED = 4


@pytest.fixture(scope="module")
def plain() -> dict[str, Language]:
    made = {recipe: run(Language(), plan(recipe), validate=True) for recipe in RECIPES}
    return made | {"bf16": run(Language(), MixedPrecisionPlan("bf16-mixed"), validate=True)}


@pytest.mark.parametrize("rows", [(16,), (2, 24), (3, 7), ()], ids=str)
@every_recipe
def test_a_converted_layer_is_torchaos_bit_for_bit(recipe: str, rows: tuple[int, ...]) -> None:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    torch.manual_seed(0)
    x, model = torch.randn(*rows, WIDTH), nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH))
    padded = nn.functional.pad(x.reshape(-1, WIDTH), (0, 0, 0, -(x.numel() // WIDTH) % 16))
    name = recipe.replace("gw_hp", "with_gw_hp")
    oracle = Float8Linear.from_float(model[0], Float8LinearConfig.from_recipe_name(name))
    expected = oracle(padded.bfloat16().requires_grad_())[: x.numel() // WIDTH].reshape(*rows, -1)
    expected.float().pow(2).sum().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()

    MixedPrecisionPlan("fp8-mixed", fp8={"recipe": recipe, "small": "convert"}).apply(model)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(x.clone().requires_grad_())
    found.float().pow(2).sum().backward()
    assert torch.equal(found, expected)
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)  # type: ignore[arg-type]


@pytest.mark.parametrize(("recipe", "each"), [("rowwise", 3), ("tensorwise", 3), ("rowwise_gw_hp", 2)])
def test_training_multiplies_in_fp8_and_nothing_else_does(recipe: str, each: int, plain: dict[str, Language]) -> None:
    with products() as made:
        module = run(Language(), plan(recipe), validate=True)
    assert len(made) == CONVERTED * each * 8
    assert same(module, plain[recipe])
    assert module.losses != plain["bf16"].losses
    assert module.losses == pytest.approx(plain["bf16"].losses, rel=0.05)


@pytest.mark.parametrize(
    ("recipe", "how"), [("rowwise", "full"), ("rowwise_gw_hp", "full"), ("tensorwise", "selective")]
)
def test_checkpointing_changes_no_bit(recipe: str, how: Any, plain: dict[str, Language]) -> None:
    with products() as made:
        module = run(Language(), plan(recipe, Checkpointing(modules="Block", mode=how)))
    assert same(module, plain[recipe])
    again = CONVERTED if how == "full" else 0  # each forward's product once more, or what it gave was kept
    assert len(made) == (CONVERTED * (2 if recipe == "rowwise_gw_hp" else 3) + again) * 8


@every_recipe
def test_evaluation_is_bf16s_own(recipe: str) -> None:
    module = run(Language(), plan(recipe), validate=True)
    seen = module.logits
    for plugin in (plan(recipe), MixedPrecisionPlan("bf16-mixed")):
        with products() as made:
            trainer(plugins=[plugin], limit_val_batches=1).validate(module, texts(), verbose=False)
        assert not made
        assert torch.equal(module.logits, seen)
        assert module.logits.dtype == torch.bfloat16


@pytest.mark.parametrize("fails_at", [-1, 3])
def test_after_a_run_and_after_a_failed_one_the_module_is_the_users(fails_at: int) -> None:
    module, other = Language(fails_at=fails_at), Language()
    plugin = plan()
    before = [type(one) for one in module.modules()]
    try:
        run(module, plugin)
    except InterruptedError:
        assert fails_at == 3
    assert [type(one) for one in module.modules()] == before
    assert not [one for one in module.modules() if "_lmp_fp8" in vars(one)]
    assert list(module.state_dict()) == list(other.state_dict())
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in module.parameters())
    assert [layer.name for layer in plugin.fp8_layers if layer.converted] == [
        f"blocks.{index}.{name}" for index in "01" for name in ("up", "down")
    ]


every_block_recipe = pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_gw_hp"])


def _rounded(values: Tensor) -> Tensor:
    """Each 32 numbers of a row by 2**-ceil(log2(amax / 448)) to E4M3, and back."""
    blocks = values.double().unflatten(-1, (-1, 32))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-118) / 448)))
    return ((blocks / scale).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


@every_block_recipe
@pytest.mark.parametrize("rows", [(64,), (2, 16), (3, 7)], ids=str)
def test_a_product_and_its_gradients_are_those_of_the_rounded_numbers(recipe: str, rows: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(64, 96)
    x = torch.randn(*rows, 64, requires_grad=True)
    fp8.apply([layer], FP8(recipe=recipe, small="convert"), torch.bfloat16, "cpu")
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


@every_block_recipe
def test_a_run_differs_from_bf16_by_rounding_and_is_the_same_recomputed(recipe: str) -> None:
    module, recomputed, bf16 = Language(), Language(), Language()
    run(module, plan(recipe))
    run(recomputed, plan(recipe, checkpointing=Checkpointing(modules="Block")))
    run(bf16, MixedPrecisionPlan("bf16-mixed"))
    assert module.losses == recomputed.losses
    assert same_weights(weights(module), weights(recomputed))
    assert module.losses != bf16.losses
    assert module.losses == pytest.approx(bf16.losses, rel=2e-2)


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


@pytest.mark.gloo
def test_ddp_and_fsdp2_are_one_device(ranks: Ranks) -> None:
    whole = ranks.run(Across("ddp", "mxfp8", alike=True))[0]
    assert whole["losses"] == run(Plain(), plan("mxfp8")).losses
    sharded = ranks.run(Across("fsdp2", "mxfp8", alike=True, options={"wrap": "Block"}))[0]
    assert sharded["losses"] == pytest.approx(whole["losses"], rel=1e-5)
