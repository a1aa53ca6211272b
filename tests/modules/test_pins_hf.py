"""The LongSpec set on real models: norms in fp32, LoRA in bf16, head and embeddings in the compute dtype."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    MambaConfig,
    MambaModel,
    RobertaConfig,
    RobertaForMaskedLM,
    ViTConfig,
    ViTModel,
)

from lightning_mp.errors import PlanError
from support.hf import VOCABULARY, gpt2, llama, loss_of, tokens
from support.pinning import Ran, pin, resolve, stored

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
COMPUTE = {"bf16-mixed": "bf16", "16-mixed": "fp16", "bf16-true": "bf16", "16-true": "fp16"}
TORCH = {"bf16": BF16, "fp16": FP16}


def longspec(mode: str) -> dict[str, dict[str, str]]:
    """The set, for each model in the names it uses."""
    compute = COMPUTE[mode]
    return {
        "llama": {"*norm*": "fp32", "lora_*": "bf16", "lm_head": compute, "embed_tokens": compute},
        "gpt2": {"ln_*": "fp32", "lora_*": "bf16", "lm_head": compute, "wte": compute},
    }


MAKE = {"llama": llama, "gpt2": gpt2}


def expected(name: str, spec: dict[str, str], rest: torch.dtype) -> torch.dtype:
    """The dtype of a parameter by the letter of the set: the first pattern found anywhere among its name's parts."""
    parts = name.split(".")
    for pattern, dtype in spec.items():
        if any(fnmatchcase(part, pattern) for part in parts):
            return {"fp32": FP32, **TORCH}[dtype]
    return rest


@pytest.mark.parametrize("mode", COMPUTE)
@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize("moved", [False, True], ids=["", "then .half()"])
def test_every_parameter_is_stored_as_the_set_says(name: str, mode: str, moved: bool) -> None:
    spec = longspec(mode)[name]
    model = pin(MAKE[name](lora=True), spec, mode=mode)
    if moved:
        model.half()
    rest = FP16 if moved else FP32 if mode.endswith("mixed") else TORCH[COMPUTE[mode]]
    found = stored(model)
    assert found == {parameter: expected(parameter, spec, rest) for parameter in found}
    assert {FP32, BF16} <= set(found.values())


@pytest.mark.parametrize("mode", ["bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", MAKE)
def test_it_trains_and_its_norms_run_in_fp32(name: str, mode: str) -> None:
    model = pin(MAKE[name](lora=True), longspec(mode)[name], mode=mode)
    norm = "native_layer_norm" if name == "gpt2" else "rsqrt"
    with Ran(norm) as ran, torch.autocast("cpu", TORCH[COMPUTE[mode]], enabled=mode.endswith("mixed")):
        loss = loss_of(model, tokens())
    loss.backward()
    assert set(ran.dtypes) == {FP32}
    assert len(ran.dtypes) == 5  # two in each of two layers, and the last
    lora = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
    assert lora
    assert all("lora_" in key and g.dtype == BF16 and g.isfinite().all() for key, g in lora.items())
    assert any(g.abs().sum() > 0 for g in lora.values())


def test_gpt2s_head_and_embeddings_are_one_weight() -> None:
    with pytest.raises(PlanError, match=r"wte\.weight pinned to fp32.*lm_head\.weight pinned to bf16"):
        resolve(gpt2(), {"wte": "fp32", "lm_head": "bf16"})
    model = pin(gpt2(), {"lm_head": "bf16"})
    assert model.lm_head.weight is model.transformer.wte.weight
    assert stored(model)["transformer.wte.weight"] == BF16
    assert {key for key, dtype in stored(model).items() if dtype == BF16} == {"transformer.wte.weight"}


def test_generation_works_with_a_key_value_cache() -> None:
    plain = llama().eval()
    prompt: dict[str, Any] = {"input_ids": tokens(1), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected_ids = plain.generate(**prompt, **settings)
    model = pin(plain, {"self_attn": "fp32", "*norm*": "fp32", "lm_head": "fp32"})
    assert torch.equal(model.generate(**prompt, **settings), expected_ids)


def test_a_whole_model_pinned_under_a_module_generates_as_before() -> None:
    """transformers looks at the arguments that ``forward`` names."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama().eval()

    wrapped = Wrapped()
    prompt: dict[str, Any] = {"input_ids": tokens(1), "attention_mask": torch.ones(1, 6, dtype=torch.long)}
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    before = wrapped.model.generate(**prompt, **settings)
    pin(wrapped, {"model": "fp32"})
    assert torch.equal(wrapped.model.generate(**prompt, **settings), before)
    assert wrapped.model(input_ids=tokens(1)).logits.shape[-1] == VOCABULARY


@pytest.mark.parametrize(
    ("mode", "spec"),
    [
        ("bf16-mixed", {"self_attn": "bf16"}),
        ("16-mixed", {"self_attn": "bf16"}),
        ("bf16-mixed", {"self_attn": "fp16"}),
        ("bf16-mixed", {"q_proj": "fp16", "k_proj": "fp16"}),
        ("16-mixed", {"q_proj": "bf16"}),
    ],
    ids=str,
)
def test_a_left_padded_batch_trains_with_half_pins_in_eager_attention(mode: str, spec: dict[str, str]) -> None:
    model = llama()
    model.set_attn_implementation("eager")
    pin(model, spec, mode=mode)
    mask = torch.ones_like(tokens())
    mask[0, :3] = 0
    with torch.autocast("cpu", TORCH[COMPUTE[mode]]):
        loss = model(input_ids=tokens(), attention_mask=mask, labels=tokens()).loss
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


CASTS_ITS_INPUT = {
    "Mamba": (lambda: MambaModel(MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32)), "norms"),
    "ViT": (lambda: ViTModel(ViTConfig(**_VISION, num_attention_heads=2, intermediate_size=32)), "projection"),
    "CNN": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3)), "norms"),
}
_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}


@pytest.mark.parametrize("name", CASTS_ITS_INPUT)
def test_a_model_that_casts_its_input_to_the_weights_dtype_gets_its_own_back(name: str) -> None:
    make, pattern = CASTS_ITS_INPUT[name]
    model = pin(make(), {pattern: "fp32"}, mode="bf16-true")
    given = tokens() if name == "Mamba" else torch.randn(2, 3, 8, 8, dtype=BF16)
    out = model(given)
    assert (out if name == "CNN" else out.last_hidden_state).dtype == BF16
    assert FP32 in stored(model).values()


@pytest.mark.parametrize("pattern", ["decoder", "word_embeddings", "embeddings"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_a_bias_shared_with_a_head_does_not_tie_the_head_to_the_decoder_in_it(kind: str, pattern: str) -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    small |= {"vocab_size": 32, "max_position_embeddings": 16}
    make = {
        "bert": lambda: BertForMaskedLM(BertConfig(**small)),
        "roberta": lambda: RobertaForMaskedLM(RobertaConfig(**small)),
    }
    model = pin(make[kind](), {pattern: "fp32"}, mode="bf16-true")
    assert model(input_ids=tokens() % 32).logits.isfinite().all()
    found = stored(model)
    dense = next(name for name in found if name.endswith(("lm_head.dense.weight", "transform.dense.weight")))
    assert found[dense] == BF16
    assert found[next(name for name in found if "word_embeddings" in name)] == FP32
