"""What a pattern means."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import Wav2Vec2Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2LayerNormConvLayer

from lightning_mp.errors import Faults
from lightning_mp.modules.patterns import matches, no_match

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
