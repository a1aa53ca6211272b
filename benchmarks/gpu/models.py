"""The models that are timed, built from their configurations, on bytes of Python's standard library."""

from __future__ import annotations

import argparse
import inspect
import typing
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """A decoder and its batch."""

    name: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    context: int
    batch: int
    #: of Llama's gated network; GPT-2's is four times as wide as ``hidden``
    intermediate: int = 0
    kv_heads: int = 0

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.context

    def build(self) -> nn.Module:
        """GPT-2, or Llama where ``intermediate`` is given."""
        from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

        ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
        if not self.intermediate:
            shape = {"n_embd": self.hidden, "n_layer": self.layers, "n_head": self.heads}
            return GPT2LMHeadModel(GPT2Config(**shape, vocab_size=self.vocabulary, n_positions=self.context, **ends))
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.vocabulary,
                hidden_size=self.hidden,
                intermediate_size=self.intermediate,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.kv_heads,
                max_position_embeddings=self.context,
                tie_word_embeddings=False,
                **ends,
            )
        )

    def flops_per_token(self, parameters: int) -> float:
        """6 N + 12 L h s, forward and backward, as MosaicML's llm-foundry counts (scripts/train/benchmarking)."""
        return 6 * parameters + 12 * self.layers * self.hidden * self.context


GPT2_SMALL = Size("GPT-2 small", 12, 768, 12, 50257, 1024, 8)
LLAMA_1B = Size("Llama, 1.1B", 16, 2048, 32, 32000, 2048, 8, intermediate=8192, kv_heads=8)
#: layers of Llama 3 8B's shapes; with four of them instead of 32, weights and optimizer state leave room on any 80 GiB
LLAMA_8B_LAYERS = Size("4 layers of Llama 8B", 4, 4096, 32, 32000, 4096, 4, intermediate=14336, kv_heads=8)
TINY = Size("tiny GPT-2", 2, 32, 2, 256, 32, 2)
TINY_LLAMA = Size("tiny Llama", 2, 32, 2, 256, 32, 2, intermediate=64, kv_heads=1)


class Decoder(LightningModule):
    """Next-byte loss of ``size``, AdamW, fused."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = size.build().train()
        self.last: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross entropy of the next byte."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.last = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Fused AdamW: nothing then waits for the device."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Batches:
    """``count`` batches that lie on the device already: no copy is timed."""

    def __init__(self, size: Size, count: int, device: str) -> None:
        text = "".join(inspect.getsource(module) for module in (argparse, inspect, typing)).encode()
        stream = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        needed = size.tokens * min(count, 8)
        stream = stream.repeat(-(-needed // len(stream)))[:needed].to(device)
        self._batches = stream.view(-1, size.batch, size.context)
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> typing.Iterator[Tensor]:
        for number in range(self._count):
            yield self._batches[number % len(self._batches)]
