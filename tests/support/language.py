"""Tiny transformers models from their configs, as LightningModules; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH, WIDTH = 64, 12, 32


def tokens(rows: int = 16, batch_size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    """Fixed random token ids (rows, LENGTH)."""
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(ids), batch_size=batch_size)


def gpt2(**config: Any) -> Any:
    """A two-layer GPT-2 without dropout, whose lm_head and wte are tied."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_positions": LENGTH,
        "n_embd": WIDTH,
        "n_layer": 2,
        "n_head": 2,
    }
    settings |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**settings, **config}))


def llama(**config: Any) -> Any:
    """A two-layer Llama with untied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **sizes, **ids, **config)
    )


class Language(LightningModule):
    """Next-token training of ``model``; ``fail_at`` raises in that batch."""

    def __init__(self, model: Any, fail_at: int | None = None) -> None:
        super().__init__()
        self.model = model.train()
        self.fail_at = fail_at
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == self.fail_at:
            raise KeyError("planned")
        loss = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=1e-4, fused=True)
