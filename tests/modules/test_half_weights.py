"""Which weights may be gathered in half precision: the rule against what a forward of each model does with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.families import FAMILIES, Family
from lightning_mp import PlanError, PrecisionPolicy
from lightning_mp.errors import Faults
from lightning_mp.modules import half_weights, pins
from lightning_mp.modules.half_weights import AutocastWeight

POLICY = PrecisionPolicy(precision="bf16-mixed")
BF16 = torch.bfloat16


def survey(module: nn.Module, policy: PrecisionPolicy = POLICY) -> set[str]:
    """The parameters that may be gathered in half precision."""
    pin_map = pins.resolve(module, policy.pins, Faults())
    return {weight.name for weight in half_weights.survey(module, pin_map, policy)}


class Own(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.weight.sum()


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Embedding(4, 4))
    net[1].weight = net[0].weight
    return net


def to_a_table() -> nn.Module:
    net = tied()
    net[2].weight = net[0].weight
    return net


CASES: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(2, 2)), {"0.weight", "0.bias"}),
    "convolution": (lambda: nn.Sequential(nn.ConvTranspose2d(1, 1, 1)), {"0.weight", "0.bias"}),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, kdim=2),
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"},
    ),
    "another kind": (lambda: nn.Sequential(nn.Bilinear(1, 1, 1, bias=False)), set()),
    "its own forward": (lambda: nn.Sequential(Own(2, 2)), set()),
    "tied": (tied, {"0.weight"}),
    "tied to a table": (to_a_table, set()),
}


def test_a_linear_that_sums_in_fp32_is_gathered_in_the_format_of_its_operands() -> None:
    pins = {"0": {"dtype": "bf16", "accumulate": "fp32"}, "1": {"dtype": "fp16", "accumulate": "fp32"}}
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    found = survey(net, PrecisionPolicy(precision="bf16-mixed", pins=pins))  # type: ignore[arg-type]
    assert found == {"0.weight"}


@pytest.mark.parametrize("case", CASES)
def test_what_qualifies(case: str) -> None:
    make, expected = CASES[case]
    assert survey(make()) == expected


def test_pins_and_modes_leave_weights_out() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    pinned = survey(net, PrecisionPolicy(precision="bf16-mixed", pins={"1": "fp32"}))
    assert pinned == {"0.weight", "0.bias"}
    assert not survey(net, PrecisionPolicy(precision="bf16-true"))


def _loss(family: Family, model: nn.Module) -> Tensor:
    batch = family.batch(torch.Generator().manual_seed(1))
    with torch.autocast("cpu", BF16, cache_enabled=False):
        return family.losses[""](model, batch)


def _trained_once(family: Family, hold: bool) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = family.model()
    if hold:
        for weight in half_weights.survey(model, pins.PinMap(), POLICY):
            half = AutocastWeight(weight.tensor.detach().to(BF16), weight.name)
            held = nn.Parameter(half, weight.tensor.requires_grad)
            for _, module, key in weight.places:
                module._parameters[key] = held
    torch.manual_seed(0)
    loss = _loss(family, model)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


SEVERAL = ("llama", "gpt2", "gemma2", "mixtral", "mamba", "bert", "deberta_v2", "t5", "whisper", "clip", "swin")
SEVERAL += ("transformer encoder", "lstm", "gru", "batchnorm cnn", "experts", "llama + lora", "weight norm")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", SEVERAL)
def test_a_step_with_half_weights_is_the_step_with_fp32_ones(name: str) -> None:
    """Each gradient, and the loss, to the last bit; nothing that the rule chose is used in another way."""
    (loss, gradients), (other, others) = (_trained_once(FAMILIES[name], hold) for hold in (False, True))
    assert torch.equal(loss, other)
    assert gradients.keys() == others.keys()
    assert all(torch.equal(gradients[key], others[key]) for key in gradients)


OTHER_USES: dict[str, Callable[[Tensor], Any]] = {
    "a penalty": lambda weight: weight.float().pow(2).sum(),
    "a norm": lambda weight: weight.norm(),
    "another cast": lambda weight: weight.double(),
    "a product without autocast": lambda weight: functional.linear(torch.ones(1, 2), weight),
    "beside another": lambda weight: torch.stack([torch.ones(2, 2), weight]),
    "written to": lambda weight: weight.detach().zero_(),
    "a view": lambda weight: weight.t()[0] * 2,
}


@pytest.mark.parametrize("use", OTHER_USES)
def test_any_other_use_names_the_parameter_and_the_pin(use: str) -> None:
    weight = nn.Parameter(AutocastWeight(torch.ones(2, 2, dtype=BF16), "model.head.weight"))
    with pytest.raises(PlanError, match=r"model\.head\.weight is bf16.*_weights\.py:\d+.*pins=\{'model\.head': "):
        OTHER_USES[use](weight)


def test_it_looks_like_an_fp32_weight_and_holds_no_copy() -> None:
    held = torch.ones(2, 2, dtype=BF16)
    weight = nn.Parameter(AutocastWeight(held, "weight"))
    assert (weight.dtype, weight.shape, weight.requires_grad) == (torch.float32, (2, 2), True)
    assert weight.to(BF16).data_ptr() == held.data_ptr() == weight.t().split(1)[0].to(BF16).data_ptr()
    for made in (torch.zeros_like(weight), weight.new_full((1,), 0.3), torch.ones(1).double().to(weight)):
        assert (type(made), made.dtype) == (Tensor, torch.float32)
    assert "weight" in repr(weight)
