"""A plan is usable before any Trainer, and can be copied, pickled and printed at any time."""

import copy
import inspect
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_mp import Checkpointing, LossScaling, MixedPrecisionPlan, PlanError, PrecisionPolicy
from lightning_mp.plan import describe
from lightning_mp.policy import PRECISIONS
from support.models import Regression
from support.oracles import MODES, SCALED
from support.running import fit

every_mode = pytest.mark.parametrize("mode", [*MODES, "auto"])
DTYPES = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}


@every_mode
def test_contexts_work(mode: str) -> None:
    plan, x = MixedPrecisionPlan(mode), torch.ones(2, 2)
    with plan.module_init_context():
        layer = nn.Linear(2, 2)
    assert layer.weight.dtype == (DTYPES[mode] if mode.endswith("-true") and mode != "32-true" else torch.float32)
    with plan.tensor_init_context():
        assert torch.ones(1).dtype == layer.weight.dtype
    with plan.forward_context():
        assert layer(plan.convert_input(x)).dtype == DTYPES.get(mode, torch.float32)
    assert plan.convert_output(plan.convert_input(x)).dtype == torch.float32
    assert plan.device == "cpu"
    with plan.train_step_context():
        assert torch.is_autocast_enabled("cpu") == mode.endswith("-mixed")
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("mode", SCALED)
def test_the_scaler_is_a_grad_scaler_that_trains_a_plain_loop(mode: str) -> None:
    plan = MixedPrecisionPlan(mode, loss_scaling=LossScaling(init_scale=64.0))
    assert isinstance(plan.scaler, torch.amp.GradScaler)
    assert plan.scaler.get_scale() == 64.0
    with plan.module_init_context():
        layer = nn.Linear(2, 1)
    optimizer, before = torch.optim.SGD(layer.parameters(), lr=0.125), layer.weight.detach().clone()
    with plan.forward_context():
        loss = layer(plan.convert_input(torch.ones(4, 2))).float().mean()
    plan.scaler.scale(loss).backward()
    assert layer.weight.grad.tolist() == [[64.0, 64.0]]
    plan.scaler.step(optimizer)
    plan.scaler.update()
    torch.testing.assert_close(layer.weight.detach(), before - 0.125)


WAYS = {"deepcopy": copy.deepcopy, "pickle": lambda plan: pickle.loads(pickle.dumps(plan))}


class CopiesThePlan(Callback):
    def __init__(self, way: Any) -> None:
        self.way = way

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.copied = self.way(trainer.precision_plugin)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["16-mixed", "bf16-true"])
def test_a_copy_made_in_the_middle_of_a_fit_is_free_of_it(mode: str, way: str) -> None:
    copies, module = CopiesThePlan(WAYS[way]), Regression(partial(AdamW, lr=1e-2, eps=1e-4))
    fit(module, plugins=[MixedPrecisionPlan(mode)], callbacks=[copies])
    again = Regression(partial(AdamW, lr=1e-2, eps=1e-4))
    fit(again, plugins=[copies.copied])
    assert again.losses == module.losses
    assert copies.copied.applied_steps + copies.copied.skipped_steps == 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(self.norm(batch))


def model() -> nn.Module:
    return nn.ModuleDict({"blocks": nn.Sequential(Block(), Block(), Block()), "norm": nn.LayerNorm(4)})


PLAN = MixedPrecisionPlan(
    "16-mixed", pins={"*norm*": "fp32", "nothing": "bf16"}, checkpointing=Checkpointing(modules="Block", every=2)
)


def test_every_rule_says_what_it_covers() -> None:
    table = dict(line.split(maxsplit=1) for line in PLAN.describe(model()).splitlines() if not line.startswith(" "))
    assert table["checkpointing"] == "Checkpointing(modules='Block', every=2): 2 modules, blocks.0, blocks.2"
    assert "pin            '*norm*' fp32: 4 modules, blocks.*.norm, norm" in PLAN.describe(model())
    assert "pin            'nothing' bf16: no module" in PLAN.describe(model())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_table_says_what_is_stored_and_computed(precision: str) -> None:
    policy = PrecisionPolicy(precision=precision)
    text = MixedPrecisionPlan(precision).describe()
    assert f"precision      {precision}" in text
    assert max(map(len, text.splitlines())) <= describe.WIDTH
    if precision != "auto":
        products = "matrix products and convolutions" if policy.mixed else "everything"
        assert f"optimizer state {policy.storage_dtype}" in text
        assert f"computed       {products} {policy.compute_dtype}" in text


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling.static(128)), "init_scale=128, dynamic=False"),
        (MixedPrecisionPlan("16-mixed"), "init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5,"),
        (MixedPrecisionPlan("auto"), "torch's rule, where the mode is fp16"),
        (MixedPrecisionPlan("bf16-mixed"), "none"),
    ],
)
def test_a_loss_scale_that_is_fixed_is_not_told_as_one_that_grows(plan: MixedPrecisionPlan, said: str) -> None:
    assert f"loss scaling   {said}" in plan.describe()


def test_a_notebook_shows_the_table_escaped() -> None:
    html = MixedPrecisionPlan(pins={"<b>": "fp32"})._repr_html_()
    assert "<b>" not in html
    assert "&lt;b&gt;" in html


@pytest.mark.parametrize("plan", [MixedPrecisionPlan(), PLAN, MixedPrecisionPlan(pins={"x" * 300: "fp32"})])
def test_a_run_begins_with_three_to_five_short_lines(plan: MixedPrecisionPlan) -> None:
    lines = describe.announcement(plan.policy, model())
    assert 3 <= len(lines) <= 5
    assert all(len(line) <= 160 for line in lines)
    assert lines[0].startswith("MixedPrecisionPlan(")


def state_of(plan: MixedPrecisionPlan, **changes: Any) -> dict[str, Any]:
    state = plan.__getstate__()
    return {**state, "_declared": {**state["_declared"], **changes}}


def test_a_saved_plan_with_an_unknown_key_is_read_and_does_not_run() -> None:
    pins = [{"pattern": "*norm*", "dtype": "fp32", "stochastic": True}]
    plan = MixedPrecisionPlan.__new__(MixedPrecisionPlan)
    plan.__setstate__(state_of(MixedPrecisionPlan("bf16-true"), colour="red", pins=pins))
    assert plan.same_as(MixedPrecisionPlan("bf16-true", pins={"*norm*": "fp32"}))
    for again in (plan, *(way(plan) for way in WAYS.values())):
        with pytest.raises(
            PlanError, match=r"A saved plan with pins\.stochastic, colour, which this lightning-mp does"
        ):
            again.apply(Block())


def test_a_saved_plan_of_a_newer_format_is_answered_with_a_sentence() -> None:
    state = MixedPrecisionPlan("bf16-mixed").__getstate__()
    del state["format_version"]
    plan = MixedPrecisionPlan.__new__(MixedPrecisionPlan)
    plan.__setstate__(state)  # as an older release wrote it
    assert plan.same_as(MixedPrecisionPlan("bf16-mixed"))
    with pytest.raises(PlanError, match="A saved plan has format version 2, and this lightning-mp reads up to 1"):
        plan.__setstate__({**state, "format_version": 2})


def test_every_attribute_of_a_plan_can_be_asked_for() -> None:
    """As debuggers and ``inspect.getmembers`` do."""
    module, plan = Regression(), MixedPrecisionPlan("16-mixed")
    assert hasattr(plan, "state_key")
    assert repr(plan.state_key)
    before = [name for name, _ in inspect.getmembers(plan)]
    fit(module, plugins=[plan], max_steps=1)
    assert [name for name, _ in inspect.getmembers(plan)] == before
