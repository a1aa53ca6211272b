"""How a model is cut into shard units: by what is wrapped, pinned and tied, without anything being changed."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.families import FAMILIES
from lightning_mp import PlanError
from lightning_mp.errors import Faults
from lightning_mp.fsdp2.units import units
from lightning_mp.modules import pins
from lightning_mp.numerics.dtypes import dtype_name, to_torch
from lightning_mp.policy import Pin
from support import hf


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(x)).relu())


class Special(Block):
    """A kind of block."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Special()])
        self.drop, self.head = nn.Dropout(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.drop(x))


def cut(
    root: nn.Module, wrap: Any = None, pinned: dict[str, str] | None = None, storage: torch.dtype = torch.float32
) -> tuple[list[str], list[str]]:
    """The names of blocks and of all inner units; PlanError for faults."""
    given = [Pin(pattern, dtype) for pattern, dtype in (pinned or {}).items()]
    with Faults() as faults:
        pin_map = pins.resolve(root, given, faults, dtype_name(storage))
        dtypes = {key: to_torch(name) for key, name in pin_map.dtypes().items()}
        blocks, inner = units(root, wrap, pin_map, lambda parameter: dtypes.get(id(parameter), storage), faults)
    names = {module: name for name, module in root.named_modules()}
    return [names[module] for module in blocks], [names[module] for module in inner]


@pytest.mark.parametrize(
    ("wrap", "blocks"),
    [
        (Block, ["layers.0", "layers.1"]),  # by class, with what derives from it
        (Special, ["layers.1"]),
        ("Block", ["layers.0"]),  # by the name of a class
        ("layers.*", ["layers.0", "layers.1"]),  # of nested matches the outermost
        ("layers", ["layers.0", "layers.1"]),  # a list stands for what it holds
        (["Special", "head"], ["layers.1", "head"]),
        (["head", Block, "layers.0"], ["layers.0", "layers.1", "head"]),  # once, and in the model's order
        (["Block", "up"], ["layers.0", "layers.0.up", "layers.1.up"]),  # several may nest
        (None, []),  # all of it under 100M parameters
    ],
)
def test_blocks_are_what_wrap_names(wrap: Any, blocks: list[str]) -> None:
    assert cut(Model(), wrap)[0] == blocks


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        ("Blok", ("'Blok'", "'Block'")),
        (nn.Bilinear, ("'Bilinear'",)),
        (["hed", "Dropout"], ("'hed'", "'head'", "'Dropout'", "2 errors")),
    ],
)
def test_what_means_no_unit_is_refused(wrap: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        cut(Model(), wrap)
    assert all(word in str(caught.value) for word in words)


def test_transformers_models_name_their_own() -> None:
    assert cut(hf.llama())[0] == ["model.layers.0", "model.layers.1"]
    bert = FAMILIES["bert"].model()  # it names its embeddings too, whose table is its head
    assert cut(bert)[0] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert cut(hf.gpt2(lora=True))[0] == [f"base_model.model.transformer.h.{index}" for index in (0, 1)]


def test_pinned_modules_are_units_before_the_blocks_around_them() -> None:
    blocks, inner = cut(Model(), Block, {"norm": "fp32"}, torch.bfloat16)
    assert blocks == ["layers.0", "layers.1"]
    assert inner == ["layers.0.norm", "layers.1.norm", "layers.0", "layers.1"]


def test_modules_that_a_model_keeps_in_fp32_are_units_and_a_part_of_one_is_refused() -> None:
    class Declaring(Model):
        _keep_in_fp32_modules_strict = ("norm",)

    assert cut(Declaring(), Block, None, torch.bfloat16)[1] == cut(Model(), Block, {"norm": "fp32"}, torch.bfloat16)[1]
    Declaring._keep_in_fp32_modules_strict = ("up.bias",)
    with pytest.raises(
        PlanError, match=r"'layers.0.up' would hold two dtypes.*layers.0.up.weight in bf.*up.bias in fl"
    ):
        cut(Declaring(), Block, None, torch.bfloat16)
    cut(Declaring(), Block, {"up": "bf16"}, torch.bfloat16)


def test_attention_is_not_cut_inside_since_it_reads_its_childrens_weights() -> None:
    root = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Linear(4, 4))
    assert cut(root, None, {"out_proj": "fp32"})[1] == []
    with pytest.raises(PlanError, match=r"of the whole model would hold two dtypes"):
        cut(root, None, {"out_proj": "fp32"}, torch.bfloat16)


def test_tied_weights_stay_in_one_unit() -> None:
    root = Model()
    root.layers[1].down.weight = root.layers[0].down.weight
    assert cut(root, None, {"down": "fp32"})[1] == []  # both fall to the root
    with pytest.raises(PlanError, match=r"'layers\.0' a shard unit, which shares a weight"):
        cut(root, Block)
    with pytest.raises(PlanError, match=r"in bfloat16 and layers\.0\.down\.weight in float32"):
        cut(root, None, {"down": "fp32"}, torch.bfloat16)


def test_what_is_in_a_pinned_sequential_is_a_unit_each() -> None:
    root = nn.ModuleDict({"stem": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(Block())), "head": Block()})
    assert cut(root, "head", {"stem": "fp32"}) == (["head"], ["stem.2.0", "stem.0", "head"])
