"""``fp8-mixed`` on one device: what is computed, when, and that nothing of it stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mp import Checkpointing, MixedPrecisionPlan
from support.fp8 import RECIPES, WIDTH, Language, plan, products, run, same, texts
from support.models import same_weights, weights
from support.running import trainer
from support.saving import SaveAt

torchao = pytest.importorskip("torchao")
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
CONVERTED = 4


@pytest.fixture(scope="module")
def plain() -> dict[str, Language]:
    """The runs that others are compared with, made once."""
    made = {recipe: run(Language(), plan(recipe), validate=True) for recipe in RECIPES}
    return made | {"bf16": run(Language(), MixedPrecisionPlan("bf16-mixed"), validate=True)}


# ---------------------------------------------------------------------- what is computed


@pytest.mark.parametrize("rows", [(16,), (2, 24), (3, 7), ()], ids=str)
@every_recipe
def test_a_converted_layer_is_torchaos_bit_for_bit(recipe: str, rows: tuple[int, ...]) -> None:
    """And where the rows are no multiple of 16, those of torchao are made one with zeros."""
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


# ---------------------------------------------------------------------- evaluation


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


def test_evaluation_in_fp8_runs_under_inference_mode_too() -> None:
    found: dict[str, Tensor] = {}
    for inference_mode in (True, False):
        module = Language()
        with products() as made:
            runner = trainer(plugins=[plan(evaluate="fp8")], limit_val_batches=1, inference_mode=inference_mode)
            runner.validate(module, texts(), verbose=False)
        assert len(made) == CONVERTED
        assert torch.equal(module.logits, found.setdefault("logits", module.logits))


# ---------------------------------------------------------------------- nothing of it stays


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


def _saved(folder: Path, plugin: Any) -> tuple[Language, Path]:
    module = Language()
    run(module, plugin, callbacks=[SaveAt(folder, 8)])
    return module, folder / "8.ckpt"


@pytest.mark.parametrize(("first", "then"), [("fp8", "fp8"), ("bf16", "fp8")])
def test_a_run_resumes_under_the_other_precision(first: str, then: str, tmp_path: Path) -> None:
    plans = {"fp8": plan, "bf16": lambda: MixedPrecisionPlan("bf16-mixed")}
    saved, path = _saved(tmp_path, plans[first]())
    resumed, whole = Language(), Language()
    with products() as made:
        run(resumed, plans[then](), max_epochs=2, ckpt_path=path)
    run(whole, plans[first](), max_epochs=2)
    assert len(resumed.losses) == 8
    assert len(made) == (8 * 3 * CONVERTED if then == "fp8" else 0)
    assert resumed.losses[0] < saved.losses[-1]
    if first == then:
        assert resumed.losses == whole.losses[8:]
        assert same_weights(weights(resumed), weights(whole))
    else:
        assert resumed.losses == pytest.approx(whole.losses[8:], rel=0.1)
