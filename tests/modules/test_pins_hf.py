"""The LongSpec set on real models: norms in fp32, LoRA in bf16, head and embeddings in the compute dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, RobertaConfig, RobertaForMaskedLM

from support.hf import VOCABULARY, llama, tokens
from support.pinning import pin, stored

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
COMPUTE = {"bf16-mixed": "bf16", "16-mixed": "fp16", "bf16-true": "bf16", "16-true": "fp16"}
TORCH = {"bf16": BF16, "fp16": FP16}


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
