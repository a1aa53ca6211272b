"""Which linear layers are converted, and the reason of each that is not."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lightning_mp import FP8, MixedPrecisionPlan
from lightning_mp.errors import Faults
from lightning_mp.modules import fp8, pins
from lightning_mp.policy import Pin
from support.hf import gpt2, llama
from support.running import faults_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}) for _ in "ab")
        self.again = self.blocks[0]
        self.odd = nn.Linear(16, 24)
        self.odd_too = nn.Linear(17, 16)
        self.tied = nn.Linear(16, 32, bias=False)
        self.tied.weight = self.embedding.weight
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.attention = nn.MultiheadAttention(16, 2)
        self.pinned = nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, 16)
        self.lazy = nn.LazyLinear(16)
        self.patched = nn.Linear(16, 16)
        self.patched.forward = torch.relu  # type: ignore[method-assign]
        self.own = Doubled(16, 16)
        self.conv1d = Conv1D(32, 16)


class Doubled(nn.Linear):
    def forward(self, input: Any) -> Any:
        return 2 * super().forward(input)


class Experts(nn.Module):
    """Matrices of experts, and what else has three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.empty(4, 32, 16)), nn.Parameter(torch.empty(4, 16, 32))
        self.positions = nn.Parameter(torch.empty(1, 16, 16))
        self.convolution = nn.Conv1d(4, 4, 3)
        self.shared = nn.Linear(16, 32)


def selected(root: nn.Module, rule: FP8, **pinned: str) -> dict[str, str | None]:
    covered = pins.resolve(root, [Pin(name, dtype) for name, dtype in pinned.items()], Faults())
    layers, chosen = fp8.select(root, rule, [member.module for member in covered.members], Faults())
    assert len(chosen) == sum(layer.converted for layer in layers)
    assert len({layer.name for layer in layers}) == len(layers)
    return {layer.name: layer.reason for layer in layers}


CONVERTED = {f"blocks.{index}.{name}": None for index in "01" for name in ("up", "down")}
LEFT = {
    "odd": "shape", "odd_too": "shape", "tied": "tied", "frozen": "frozen", "attention.out_proj": "kind",
    "pinned": "pinned", "lm_head": "skip", "lazy": "kind", "patched": "kind", "own": "kind", "conv1d": "kind",
}  # fmt: skip


def test_every_layer_stands_once_with_its_reason() -> None:
    assert selected(Model(), FP8(small="convert"), pinned="fp32") == CONVERTED | LEFT


def test_the_weights_of_experts_are_listed_as_left_out() -> None:
    root = nn.ModuleDict({"experts": Experts()})
    assert selected(root, FP8(small="convert")) == {
        "experts.up": "kind",
        "experts.down": "kind",
        "experts.shared": None,
    }
    layers = {layer.name: layer.shape for layer in fp8.select(root, FP8(small="convert"), (), Faults())[0]}
    assert layers["experts.up"] == (4, 32, 16)
    with Faults() as faults:
        fp8.select(root, FP8(small="convert", skip="shared"), (), faults)
        (fault,) = faults.found
        faults.found.clear()
    assert "experts.up (4, 32, 16): kind" in str(fault)


@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ({}, dict.fromkeys(CONVERTED, "size")),
        ({"small": "convert", "skip": ()}, {"lm_head": None}),
        ({"small": "convert", "skip": ("blocks", "lm_head")}, dict.fromkeys(CONVERTED, "skip")),
        ({"small": "convert", "skip": "*.up"}, {"blocks.0.up": "skip", "blocks.1.up": "skip", "lm_head": None}),
        ({"small": "convert", "modules": "1"}, {"blocks.0.up": "skip", "blocks.0.down": "skip"}),
    ],
    ids=str,
)
def test_the_rule_says_which(rule: dict[str, Any], changed: dict[str, str | None]) -> None:
    found = selected(Model(), FP8(**rule), pinned="fp32")
    everywhere = {name: reason for name, reason in found.items() if name in CONVERTED or name == "lm_head"}
    assert everywhere == CONVERTED | {"lm_head": "skip"} | changed


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_what_pays_is_torchaos_own_filter(recipe: str) -> None:
    torchao = pytest.importorskip("torchao.float8")
    ask = torchao._auto_filter_for_recipe(recipe, [])
    for out in (16, 1024, 1040, 2048, 2064, 4096, 4112, 8192):
        for into in (16, 1024, 1040, 2048, 2064, 4096, 4112, 8192):
            linear = nn.Linear(into, out, device="meta")
            assert fp8.pays(recipe, out, into) == ask(linear, ""), (out, into)


def test_adapters_and_what_they_adapt_are_left() -> None:
    model = llama(lora=True)
    found = selected(model, FP8(small="convert", skip=()))
    assert {reason for name, reason in found.items() if "lora_" in name} == {"adapter"}
    assert {reason for name, reason in found.items() if "lora_" not in name} == {"frozen"}


@pytest.mark.parametrize(
    ("model", "rule", "says", "fix"),
    [
        (gpt2, FP8(small="convert"), "c_attn (16, 48): kind", "use precision='bf16-mixed'"),
        (gpt2, FP8(small="convert"), "A Conv1D is no torch.nn.Linear, which alone is converted", ""),
        (llama, FP8(), "2 x model.layers.*.self_attn.q_proj (16, 16): size", "FP8(small='convert')"),
        (nn.Identity, FP8(), "it has no Linear", "bf16-mixed"),
    ],
)
def test_nothing_to_convert_is_refused_with_the_table(model: Any, rule: FP8, says: str, fix: str) -> None:
    (fault,) = faults_of(lambda: MixedPrecisionPlan("fp8-mixed", fp8=rule).apply(model()))
    assert says in fault.problem
    assert fix in fault.fix
