"""Tiny transformers models from their configs, as LightningModules; nothing is downloaded."""

from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from support import hf

VOCABULARY, LENGTH, WIDTH = 64, 12, 32


def tokens(rows: int = 16, batch_size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(ids), batch_size=batch_size)


#: of a two-layer GPT-2 whose lm_head and wte are tied
gpt2 = partial(hf.gpt2, vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH)
_SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "hidden_size": WIDTH, "intermediate_size": 64}
#: of a two-layer Llama with untied embeddings
llama = partial(hf.llama, **_SIZES, num_key_value_heads=2, bos_token_id=0, eos_token_id=0, pad_token_id=0)


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
