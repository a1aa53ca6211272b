"""What a pattern matches, and the swap of an instance's class for a subclass of it, and back."""

import pickle
from abc import ABC
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn
from transformers import Wav2Vec2Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2LayerNormConvLayer

from lightning_mp import MixedPrecisionPlan
from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import Swapped, matches, no_match, swap_in, swap_out
from support.models import Regression
from support.running import fit

LINEAR, NORM = nn.Linear(2, 2), nn.LayerNorm(2)


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
        ("*lm_haed", "'lm_head'"), ("LM_HEAD", "'lm_head'"), ("*.layer_norm.*", "'LayerNorm'"), ("Normm", "'norms'"),
        ("zzz", "choose among the modules here: body, LayerNorm, lm_head, Linear"),
    ],
)  # fmt: skip
def test_a_pattern_that_matches_nothing_is_told_with_the_names_most_like_it(pattern: str, near: str) -> None:
    faults, root = Faults(), nn.ModuleDict({"body": NORM, "lm_head": LINEAR})
    no_match(pattern, root, "pin", faults)
    (fault,) = faults.found
    assert fault.problem == f"pin {pattern!r}, which matches no module"
    assert near in fault.fix


T = TypeVar("T")


class Doubled(Swapped):
    def forward(self, *args: Any) -> Any:
        return 2 * super().forward(*args)  # type: ignore[misc]


class Shifted(Swapped):
    def forward(self, *args: Any) -> Any:
        return 1 + super().forward(*args)  # type: ignore[misc]


class Negated(Swapped):
    def forward(self, *args: Any) -> Any:
        return -super().forward(*args)  # type: ignore[misc]


ONE = torch.ones(1)


class Abstract(ABC, nn.Identity): ...


class Of(Generic[T], nn.Identity): ...


class OfFloats(Of[float], nn.Module): ...


@pytest.mark.parametrize("cls", [Abstract, Of, OfFloats])
def test_a_class_whose_first_base_has_no_dict_takes_a_mixin(cls: type[nn.Module]) -> None:
    module = cls()
    swap_in(module, Doubled)
    swap_in(module, Shifted)
    assert module(ONE) == pickle.loads(pickle.dumps(module))(ONE) == 3
    swap_out(module, Doubled)
    assert module(ONE) == 2
    swap_out(module, Shifted)
    assert type(module) is cls


@pytest.mark.parametrize("order", [(Doubled, Shifted), (Shifted, Doubled)])
def test_a_forward_set_on_the_instance_is_run_within(order: tuple[type[Swapped], type[Swapped]]) -> None:
    """As Liger's kernels are put in, and ``module.forward = torch.compile(module.forward)``."""
    module, own = nn.Linear(2, 2), lambda x: x + 10
    module.forward = own
    swap_in(module, order[0])
    swap_in(module, order[1])
    swap_in(module, Negated, innermost=True)
    inner = -torch.tensor([10.0])
    expected = {Doubled: 1 + 2 * inner, Shifted: 2 * (1 + inner)}[order[0]]
    assert torch.equal(module(torch.zeros(1)), expected)
    for mixin in (*order, Negated):
        swap_out(module, mixin)
    assert type(module) is nn.Linear
    assert vars(module)["forward"] is own


def test_a_patched_norm_is_pinned_and_given_back() -> None:
    module = Regression()
    seen: list[torch.dtype] = []

    def patched(x: Tensor) -> Tensor:
        seen.append(x.dtype)
        return nn.functional.layer_norm(x, (x.shape[-1],))

    module.net[1].forward = patched
    fit(module, plugins=[MixedPrecisionPlan("bf16-mixed", pins={"norms": "bf16"}, checkpointing="net.1")])
    assert set(seen) == {torch.bfloat16}
    assert len(seen) == 16, "each of 8 steps recomputes it"


class ByType(Regression):
    """Leaves weight decay off norms, which it tells by ``type(m) is``, as many recipes do."""

    def configure_optimizers(self) -> Any:
        norms = {id(p) for m in self.modules() if type(m) is nn.LayerNorm for p in m.parameters()}
        self.no_decay = len(norms)
        assert type(self) is ByType
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def test_configure_optimizers_sees_the_classes_that_the_user_wrote() -> None:
    module = ByType()
    fit(module, plugins=[MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"}, checkpointing="net")])
    assert module.no_decay == 2
    assert "configure_optimizers" not in vars(module)
