"""Which pin covers which module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Wav2Vec2Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2LayerNormConvLayer

from lightning_mp.errors import Faults, PlanError
from lightning_mp.modules import pins
from lightning_mp.modules.patterns import matches, no_match
from lightning_mp.policy import Pin
from support.pinning import Declared, dtypes_by_name, resolve


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.mlp = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):  # type: ignore[no-untyped-def]
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Two blocks in a list, a final norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm_f = nn.LayerNorm(4)
        self.head = nn.Linear(4, 4)

    def forward(self, x):  # type: ignore[no-untyped-def]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm_f(x))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, {}),
        ({"head": "bf16"}, {"head": "bf16"}),
        ({"norm*": "fp32"}, {"blocks.0.norm": "fp32", "blocks.1.norm": "fp32", "norm_f": "fp32"}),
        ({"LayerNorm": "fp32"}, {"blocks.0.norm": "fp32", "blocks.1.norm": "fp32", "norm_f": "fp32"}),
        (
            {"blocks.0": "fp32"},
            {"blocks.0": "fp32", "blocks.0.norm": "fp32"}
            | dict.fromkeys(("blocks.0.mlp", "blocks.0.mlp.0", "blocks.0.mlp.1"), "fp32"),
        ),
        ({"*.1.norm": "fp32", "norm": "bf16"}, {"blocks.0.norm": "bf16", "blocks.1.norm": "fp32"}),
        (
            {"norm": "fp32", "Block": "bf16"},
            {
                **{f"blocks.{k}.norm": "fp32" for k in (0, 1)},
                **{f"blocks.{k}{rest}": "bf16" for k in (0, 1) for rest in ("", ".mlp", ".mlp.0", ".mlp.1")},
            },
        ),
    ],
    ids=str,
)
def test_a_pin_covers_what_it_matches_and_what_is_below_and_the_first_wins(
    spec: Declared, expected: dict[str, str]
) -> None:
    assert dtypes_by_name(Net(), spec) == expected


def test_a_container_pinned_first_leaves_nothing_to_a_later_pin_below_it() -> None:
    found = resolve(Net(), {"Block": "bf16", "norm": "fp32", "head": "fp32"})
    assert found.shadowed == ("norm",)
    assert {m.pin.dtype for m in found.members if m.name.endswith(".norm")} == {"bf16"}


def test_all_patterns_that_match_nothing_are_told_together() -> None:
    with pytest.raises(PlanError) as error:
        resolve(Net(), {"haed": "fp32", "head": "fp32", "blcks.0": "bf16"})
    assert [fault.problem for fault in error.value.faults] == [
        "pin 'haed', which matches no module",
        "pin 'blcks.0', which matches no module",
    ]
    assert "'head'" in str(error.value)
    assert "'blocks.0'" in str(error.value)


def test_the_word_norms_is_no_error_in_a_model_without_any() -> None:
    found = resolve(nn.Sequential(nn.Linear(2, 2)), {"norms": "fp32"})
    assert (found.members, found.shadowed) == ((), ())


# ---------------------------------------------------------------------- shared modules and tied weights


class Tied(nn.Module):
    """As GPT-2: the head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"wte": nn.Embedding(8, 4), "ln": nn.LayerNorm(4)})
        self.lm_head = nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.body["wte"].weight

    def forward(self, ids):  # type: ignore[no-untyped-def]
        return self.lm_head(self.body["ln"](self.body["wte"](ids)))


def test_contradicting_pins_on_a_tied_weight_are_a_fault_that_names_both_places() -> None:
    with pytest.raises(PlanError) as error:
        resolve(Tied(), {"lm_head": "bf16", "wte": "fp32"})
    (fault,) = error.value.faults
    assert "body.wte.weight pinned to fp32" in fault.problem
    assert "lm_head.weight pinned to bf16" in fault.problem
    assert "tied" in fault.problem
    assert "untie" in fault.fix


@pytest.mark.parametrize("spec", [{"lm_head": "bf16"}, {"wte": "bf16"}, {"wte": "bf16", "lm_head": "bf16"}], ids=str)
def test_a_pin_on_one_owner_of_a_tied_weight_covers_the_other(spec: Declared) -> None:
    assert dtypes_by_name(Tied(), spec) == {"body.wte": "bf16", "lm_head": "bf16"}


class Shared(nn.Module):
    """One module under two names."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.one = nn.Sequential(shared)
        self.two = nn.Sequential(shared)

    def forward(self, x):  # type: ignore[no-untyped-def]
        return self.two(self.one(x))


@pytest.mark.parametrize("name", ["one.0", "two.0"])
def test_a_shared_module_may_be_pinned_under_either_of_its_names_and_is_listed_once(name: str) -> None:
    members = resolve(Shared(nn.Linear(4, 4)), {name: "fp32"}).members
    assert [member.pin.dtype for member in members] == ["fp32"]


def test_a_weight_that_the_root_holds_too_cannot_be_pinned() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.weight = self.head.weight

    faults = Faults()
    pins.resolve(Root(), [Pin("head", "fp32")], faults)
    (fault,) = faults.found
    assert "head.weight, which is tied to the root module's own 'weight'" in fault.problem


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
@pytest.mark.parametrize("pattern", ["0", "0.0"])
def test_a_pin_that_covers_what_torch_jit_compiled_is_refused_by_its_name(pattern: str) -> None:
    root = nn.Sequential(nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2)))))
    faults = Faults()
    pins.resolve(root, (Pin(pattern=pattern, dtype="fp32"),), faults)
    assert [fault.problem for fault in faults.found] == [f"pin {pattern!r} on '0.0', which torch.jit compiled"]


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("pattern", ["0", "Lazy*", "norms", "net"])
def test_a_pin_waits_for_the_parameters_that_a_first_batch_makes(pattern: str) -> None:
    root = nn.ModuleDict({"net": nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())})
    with pytest.raises(PlanError, match=r"parameters do not exist yet. Run one batch through it first"):
        resolve(root, {pattern: "fp32"})
    root["net"](torch.ones(2, 3))
    assert resolve(root, {pattern.replace("Lazy", ""): "fp32"}).members


# ---------------------------------------------------------------------- patterns

LINEAR, NORM = nn.Linear(2, 2), nn.LayerNorm(2)


def test_the_word_for_norms_is_offered() -> None:
    faults = Faults()
    no_match("Normm", nn.Sequential(LINEAR, NORM), "pin", faults)
    assert "'norms'" in faults.found[0].fix


@pytest.mark.parametrize(
    ("pattern", "name", "module", "found"),
    [
        ("lm_head", "lm_head", LINEAR, True),
        ("lm_head", "model.lm_head", LINEAR, True),
        ("lm_head", "model.lm_head.weight_holder", LINEAR, False),
        ("lm_head", "model.not_lm_head", LINEAR, False),
        ("head", "model.lm_head", LINEAR, False),
        ("*head", "model.lm_head", LINEAR, True),
        ("lora_*", "layers.0.q_proj.lora_A", LINEAR, True),
        ("lora_*", "layers.0.q_proj.lora_A.default", LINEAR, True),
        ("q_proj.lora_?", "layers.0.q_proj.lora_A", LINEAR, True),
        ("*norm*", "layers.0.input_layernorm", LINEAR, True),
        ("*.h.*", "transformer.h.0", LINEAR, True),
        ("h.[01]", "transformer.h.1", LINEAR, True),
        ("h.[01]", "transformer.h.2", LINEAR, False),
        ("LayerNorm", "ln_f", NORM, True),
        ("Layer*", "ln_f", NORM, True),
        ("layernorm", "ln_f", NORM, False),
        ("LN_F", "ln_f", NORM, False),
        ("*Norm*", "input_layernorm", LINEAR, False),
        ("Layer", "ln_f", NORM, False),
        ("*", "anything", LINEAR, True),
        ("norms", "ln_f", NORM, True),
        ("norms", "1", nn.BatchNorm2d(2), True),
        ("norms", "1", nn.GroupNorm(1, 2, affine=False), True),
        ("norms", "q", LlamaRMSNorm(2), True),
        ("norms", "q", type("OwnNorm", (nn.Module,), {})(), False),
        ("norms", "q", type("Ours", (nn.LayerNorm,), {})(2), True),
        ("norms", "conv_layers.0", Wav2Vec2LayerNormConvLayer(Wav2Vec2Config()), False),
        ("norms", "input_norm", LINEAR, False),
        ("norms", "head", nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False),
        ("norms", "encoder.norms", nn.ModuleList(), True),
        ("Linear", "head", nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), True),
        ("Linear", "head", nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)), True),
        ("ParametrizedLinear", "head", nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)), True),
        ("Linear", "head", type("ParametrizedLinear", (nn.Module,), {})(), False),
    ],
)
def test_a_pattern_is_a_name_a_dotted_suffix_or_a_class_in_its_own_case(
    pattern: str, name: str, module: nn.Module, found: bool
) -> None:
    assert matches(pattern, name, module) is found


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("*lm_haed", "'lm_head'"),
        ("LM_HEAD", "'lm_head'"),
        ("*.layer_norm.*", "'LayerNorm'"),
        ("zzz", "choose among the modules here: body, LayerNorm, lm_head, Linear"),
    ],
)
def test_a_pattern_that_matches_nothing_is_told_with_the_names_most_like_it(pattern: str, near: str) -> None:
    faults, root = Faults(), nn.ModuleDict({"body": NORM, "lm_head": LINEAR})
    no_match(pattern, root, "pin", faults)
    (fault,) = faults.found
    assert fault.problem == f"pin {pattern!r}, which matches no module"
    assert near in fault.fix
