"""The model types that the planner counts: each held to the matrices of the model that transformers makes of it."""

import re
from typing import Any

import pytest
import torch

from lightning_mp.errors import PlanError
from lightning_mp.planner import ModelShape, estimate
from lightning_mp.planner.families import FAMILIES, MIXTURES
from support.docs import text

transformers = pytest.importorskip("transformers")
KINDS = list(transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

_SIZES = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": 520}
#: two sizes that differ in all that a formula could mistake: shared heads, their width, a gate, the tied table
SIZES: dict[str, dict[str, Any]] = {
    "narrow heads": {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 272, "max_position_embeddings": 136},
    "wide heads": {
        **_SIZES,
        "num_hidden_layers": 3,
        "num_key_value_heads": 6,
        "head_dim": 32,
        "intermediate_size": 384,
        "ffn_dim": 384,
        "max_position_embeddings": 264,
    },
}


#: transformers makes no model of these without a head size
_NEED_HEAD_DIM = ("hunyuan_v1_dense", "ministral")


def _config(kind: str, sizes: dict[str, Any]) -> Any:
    """Transformers' config of that type, with those of the sizes that the type has."""
    usual = transformers.AutoConfig.for_model(kind)
    named = {getattr(usual, "attribute_map", {}).get(name, name): size for name, size in sizes.items()}
    fields = {name: size for name, size in named.items() if name in vars(usual)}
    if kind in _NEED_HEAD_DIM:
        fields.setdefault("head_dim", 16)
    return transformers.AutoConfig.for_model(kind, **fields, pad_token_id=0)


def _matrices(config: Any) -> int:
    """The numbers in matrices of the causal language model that transformers makes, without memory."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)


def _counted_matrices(config: Any) -> int:
    shape = ModelShape.from_config(config)
    norms = (2 * shape.layers + 1) * shape.hidden
    return shape.params - norms


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind in KINDS])
def test_every_matrix_of_a_counted_model_type_is_counted(kind: str, size: str) -> None:
    config = _config(kind, SIZES[size])
    assert _counted_matrices(config) == _matrices(config)


#: switches of a config that change its matrices
SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "Falcon 40B": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon RW": ("falcon", {"multi_query": False}),
    "SantaCoder with all heads": ("gpt_bigcode", {"multi_query": False, "num_key_value_heads": 6}),
    "Llama with a tied table": ("llama", {"tie_word_embeddings": True}),
    "GPT-2 with a narrow MLP": ("gpt2", {"n_inner": 272}),
    "MPT, whose ratio transformers does not read": ("mpt", {"expansion_ratio": 2}),
    "GPT-NeoX Japanese with a narrow MLP": ("gpt_neox_japanese", {"intermediate_multiple_size": 2}),
    "BERT of one kind of token": ("bert", {"type_vocab_size": 1}),
}


@pytest.mark.parametrize("case", SWITCHES)
def test_a_switch_of_the_config_is_counted(case: str) -> None:
    kind, switch = SWITCHES[case]
    config = _config(kind, {**SIZES["narrow heads"], **switch})
    assert {name: getattr(config, name) for name in switch} == switch
    assert _counted_matrices(config) == _matrices(config)


def test_every_other_model_type_is_refused() -> None:
    for kind in KINDS:
        if kind in FAMILIES or kind in MIXTURES or kind == "gpt-sw3":  # GPT-2 by another name
            continue
        with pytest.raises(PlanError, match="Give ModelShape"):
            ModelShape.from_config({"model_type": kind, **SIZES["narrow heads"]})
    for name in ("zamba2", "gemma3n_text", "recurrent_gemma", "lfm2", "mamba", "mamba2", "rwkv", "bamba", "ctrl"):
        with pytest.raises(PlanError, match=f"model_type='{name}' is no dense decoder that is counted"):
            ModelShape.from_config({"model_type": name, **SIZES["narrow heads"]})


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "opt", "word_embed_proj_dim": 48},
        {"model_type": "gpt2", "add_cross_attention": True},
        {"model_type": "of_my_own"},
    ],
)
def test_a_model_with_further_matrices_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="Give ModelShape"):
        ModelShape.from_config({**fields, **_SIZES})


def test_vectors_are_less_than_a_third_of_a_per_cent() -> None:
    config = transformers.AutoConfig.for_model("gpt2")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    params = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(config).params == pytest.approx(params, rel=3e-3)


@pytest.mark.parametrize(("kind", "gated"), [("gemma", True), ("gpt2", False)])
def test_an_mlp_of_four_times_the_width_has_a_gate_where_its_family_has(kind: str, gated: bool) -> None:
    layout: dict[str, Any] = {"gpu": "h100-80", "gpus": 1, "strategy": "auto", "micro_batch": 8}
    config = _config(kind, SIZES["wide heads"])
    shape = ModelShape.from_config(config)
    assert (shape.intermediate, shape.gated) == (4 * shape.hidden, gated)
    # an MLP that is wider by one number has as much to keep for its backward pass
    wider = ModelShape(
        shape.params, shape.layers, shape.hidden, shape.heads, shape.kv_heads, 385, shape.vocab, shape.seq_len
    )
    kept, near = (estimate(each, **layout).parts["activations"] for each in (shape, wider))
    assert (kept == pytest.approx(near, rel=0.01)) == gated


def test_the_page_lists_the_model_types_that_are_counted() -> None:
    paragraph = text("docs/reference/planner.md").partition("Counted are:")[2].partition("**Mixtures")[0]
    assert set(re.findall(r"`([\w-]+)`", paragraph)) == set(FAMILIES)
