"""What the cells of the tables of plans and of optimizers train: a tiny Llama of random weights, on made-up text."""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, ROWS = 128, 12, 8


def llama() -> nn.Module:
    """Two layers from its config, the same weights wherever it is made; its head is not tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": LENGTH}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        # eager attention: its matrix products can be seen one by one
        model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, attn_implementation="eager", use_cache=False))
    return model.train()


def text(generator: torch.Generator) -> Tensor:
    """Each token is 5 times the one before plus 1, but for one in ten."""
    tokens = [torch.randint(VOCABULARY, (ROWS,), generator=generator)]
    for _ in range(LENGTH - 1):
        noise = torch.randint(VOCABULARY, (ROWS,), generator=generator)
        ruled = (tokens[-1] * 5 + 1) % VOCABULARY
        tokens.append(torch.where(torch.rand(ROWS, generator=generator) < 0.1, noise, ruled))
    return torch.stack(tokens, dim=1)
