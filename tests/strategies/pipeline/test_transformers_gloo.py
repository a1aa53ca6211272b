"""transformers' decoders cut by themselves: with several kinds of attention in their layers, and with padding."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from support.pipeline import VOCABULARY, Fit, Llama, equal
from support.ranks import Ranks

pytestmark = pytest.mark.gloo

SLIDING, FULL = "sliding_attention", "full_attention"


class Decoder(Llama):
    """A model of the class ``kind`` and of six tokens, of which an attention window sees two."""

    kind = "Llama"
    options: tuple[tuple[str, Any], ...] = ()

    def build(self) -> None:
        import transformers

        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
        heads = {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        config = getattr(transformers, f"{self.kind}TextConfig", None) or getattr(transformers, f"{self.kind}Config")
        ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
        model = getattr(transformers, f"{self.kind}ForCausalLM")
        self.model = model(config(**{**sizes, **heads, **ids, **dict(self.options)})).train()


class Padded(Decoder):
    """Every other row ends in two tokens that are no data."""

    def pipeline_batch(self, batch: Any) -> Any:
        mask = batch[2].new_ones(batch[2].shape)
        mask[:, -2:] = batch[2][:, :1] % 2
        return (batch[2], mask), batch[2]

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        return self.model(input_ids=inputs[0], attention_mask=inputs[1]).logits

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(batch[2])


class Mistral(Decoder):
    kind, options = "Mistral", (("sliding_window", 2),)


class Qwen2(Padded):
    kind = "Qwen2"
    options = (("use_sliding_window", True), ("sliding_window", 2), ("max_window_layers", 1))


class Qwen3(Decoder):
    kind = "Qwen3"
    options = (("use_sliding_window", True), ("sliding_window", 2), ("layer_types", [SLIDING, FULL, FULL, SLIDING]))


class PaddedLlama(Padded):
    kind = "Llama"


class Gemma(Decoder):
    kind = "Gemma"


class Gemma2(Padded):
    kind = "Gemma2"
    options = (("sliding_window", 2), ("final_logit_softcapping", 2.0), ("attn_implementation", "eager"))


class Gemma3(Decoder):
    kind = "Gemma3"
    options = (("sliding_window", 2), ("layer_types", [SLIDING, FULL, FULL, SLIDING]), ("final_logit_softcapping", 2.0))


FAST = {"Qwen3": Fit(module=Qwen3, steps=2)}
SLOW = {
    "Llama, padded": Fit("bf16-mixed", "interleaved_1f1b", PaddedLlama, steps=2),
    "Mistral": Fit(module=Mistral, steps=2),
    "Mistral, zero bubble": Fit("16-mixed", "interleaved_zero_bubble", Mistral, steps=2, scale=64.0),
    "Qwen2, padded": Fit("16-mixed", "interleaved_1f1b", Qwen2, steps=2, scale=64.0),
    "Qwen2, padded, zero bubble": Fit(schedule="interleaved_zero_bubble", module=Qwen2, steps=2),
    "Qwen3, interleaved": Fit("bf16-mixed", "interleaved_1f1b", Qwen3, steps=2),
    "Gemma": Fit(module=Gemma, steps=2),
    "Gemma 2, padded": Fit(module=Gemma2, steps=2),
    "Gemma 3": Fit("bf16-mixed", "interleaved_1f1b", Gemma3, steps=2),
}


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_decoder_in_stages_is_the_one_on_one_process(name: str, ranks: Ranks) -> None:
    equal({**FAST, **SLOW}[name], ranks)
