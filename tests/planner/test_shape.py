"""The shape of a model: what it refuses, and how many parameters a size or a config comes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_mp import PlanError
from lightning_mp.planner import ModelShape, advise
from lightning_mp.planner.shape import _USUAL


def test_a_shape_refuses_what_is_no_number() -> None:
    with pytest.raises(PlanError, match="2 faults"):
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
