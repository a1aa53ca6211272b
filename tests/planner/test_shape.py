"""The shape of a model: what it refuses, and how many parameters a size or a config comes to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_mp import PlanError
from lightning_mp.planner import ModelShape, advise, estimate, flops_per_token
from lightning_mp.planner.shape import _USUAL


def test_a_shape_refuses_what_is_no_number() -> None:
    with pytest.raises(PlanError, match="2 errors"):
        ModelShape(params=0, layers=2, hidden="64")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="kv_heads=3 for 8 heads"):
        ModelShape(params=100, layers=2, hidden=64, heads=8, kv_heads=3)


@pytest.mark.parametrize(("params", "layers", "hidden"), _USUAL)
def test_a_size_is_near_what_was_asked_for(params: float, layers: int, hidden: int) -> None:
    assert ModelShape.of_size(params).params == pytest.approx(params, rel=0.07)


_SMALL: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
_SHARED: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "intermediate_size": 176}
CONFIGS: dict[str, tuple[dict[str, Any], float]] = {
    "llama": (_SHARED, 1e-9),
    "qwen3": ({**_SHARED, "head_dim": 32}, 1e-2),  # heads wider than their share, with norms
    "gemma": ({**_SHARED, "head_dim": 16, "intermediate_size": 256}, 1e-9),  # a gate in an MLP of four times the width
    "falcon": (_SMALL, 1e-2),  # heads that share keys and values, all of them
    # GPT-2's biases and positions are left out.
    "gpt2": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}, 0.1),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_gives_the_parameters_that_transformers_makes(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    small, within = CONFIGS[kind]
    config = transformers.AutoConfig.for_model(kind, **small)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(config).params == pytest.approx(counted, rel=within)
    for said in (config.to_dict(), {"model_type": kind, **small}):  # a file leaves out what is its type's default
        assert ModelShape.from_config(said) == ModelShape.from_config(config)
    assert advise(model, gpu="a100-80", gpus=1).shape.params == counted


_EXPERTS: dict[str, Any] = {**_SHARED, "hidden_size": 256, "num_experts_per_tok": 2, "num_hidden_layers": 3}
_LOW_RANK: dict[str, Any] = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "v_head_dim": 24, "qk_nope_head_dim": 16}
#: the config, how far off biases and norms of low rank leave the count, and the MLPs' width that a token goes through
MIXTURES: dict[str, tuple[str, dict[str, Any], float, int]] = {
    "mixtral": ("mixtral", {**_EXPERTS, "num_local_experts": 8}, 1e-9, 2 * 176),
    "qwen3": (
        "qwen3_moe",  # layers 0 and 2 of three are dense, and 176 wide
        {**_EXPERTS, "num_experts": 8, "moe_intermediate_size": 64, "decoder_sparse_step": 2, "mlp_only_layers": [2]},
        1e-3,
        (2 * 176 + 2 * 64) // 3,
    ),
    "deepseek": (
        "deepseek_v3",
        {
            **_EXPERTS,
            **_LOW_RANK,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
        },
        1e-9,
        round((176 + 2 * 3 * 64) / 3),
    ),
    "gpt-oss": ("gpt_oss", {**_EXPERTS, "num_local_experts": 8, "head_dim": 64}, 1e-2, 2 * 176),
}


@pytest.mark.parametrize("case", MIXTURES)
def test_memory_counts_all_experts_and_flops_those_of_a_token(case: str) -> None:
    transformers = pytest.importorskip("transformers")
    kind, small, within, wide = MIXTURES[case]
    config = transformers.AutoConfig.for_model(kind, **small)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    counted = sum(sizes.values())
    active = sum(size * (2 / 8 if ".experts." in name else 1) for name, size in sizes.items())
    shape = ModelShape.from_config(config)
    assert (shape.params, shape.active) == pytest.approx((counted, active), rel=within)
    assert shape.active < 0.9 * shape.params
    assert abs(shape.intermediate - wide) <= 1
    assert flops_per_token(shape) == 6 * shape.active + 12 * 3 * 256 * shape.seq_len
    for said in (config.to_dict(), {"model_type": kind, **small}):
        assert ModelShape.from_config(said) == shape
    found = advise(model, gpu="a100-80", gpus=1).shape
    assert (found.params, found.active) == pytest.approx((counted, active), rel=within)


def test_a_mixture_takes_the_memory_of_all_and_the_time_of_the_active() -> None:
    whole = ModelShape(params=40_000_000_000, layers=32, hidden=4096)
    mixture = replace(whole, active=10_000_000_000)
    run: dict[str, Any] = {"gpu": "h100-80", "gpus": 8, "precision": "bf16-mixed", "micro_batch": 8}
    one, other = estimate(whole, **run), estimate(mixture, **run)
    assert one.parts == other.parts
    assert other.tokens_per_s.mid > 2 * one.tokens_per_s.mid
    assert (one.measured, other.measured) == (True, False)
    with pytest.raises(PlanError, match="active=20 of params=10"):
        ModelShape(params=10, layers=1, hidden=1, active=20)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({**_SMALL, "num_local_experts": 8}, "config of a mixture of 8 experts"),
        ({**_SMALL, "is_encoder_decoder": True}, "config of an encoder and a decoder"),
        ({"hidden_size": 64, "num_hidden_layers": 2, "image_size": 224}, "config of a model of images"),
        (None, "config with nothing"),
    ],
)
def test_a_config_of_another_kind_is_refused(given: Any, text: str) -> None:
    with pytest.raises(PlanError, match=text):
        ModelShape.from_config(given)
