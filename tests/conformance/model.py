"""What every cell trains: a small Llama on text with a rule in it, and data that goes on where a checkpoint left it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from lightning_mp.compat.lightning import LightningModule
from support.models import InfiniteGradient

VOCABULARY, LENGTH, ROWS = 128, 12, 8
STEPS = 20
CLIP = 0.5
LEARNING_RATE = 2e-2
BAD_RANK = 1


def llama() -> nn.Module:
    """A two-layer Llama from its config; its head is not tied. The same weights wherever it is made."""
    from transformers import LlamaConfig, LlamaForCausalLM

    generator = torch.get_rng_state()
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": LENGTH}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    # eager attention: its matrix products can be seen one by one
    config = LlamaConfig(**sizes, **heads, **ids, attn_implementation="eager", use_cache=False)
    model = LlamaForCausalLM(config).train()
    torch.set_rng_state(generator)
    return model


def whole_shapes() -> dict[str, int]:
    """Parameter name inside :class:`Language` → how many numbers it has before anything is sharded."""
    return {f"model.{name}": parameter.numel() for name, parameter in llama().named_parameters()}


def batches(steps: int = STEPS, without: tuple[int, ...] = ()) -> list[Tensor]:
    """Global batches: each token is 5 times the one before plus 1, but for one in ten."""
    generator = torch.Generator().manual_seed(11)
    made = []
    for _ in range(steps):
        tokens = [torch.randint(VOCABULARY, (ROWS,), generator=generator)]
        for _ in range(LENGTH - 1):
            noise = torch.randint(VOCABULARY, (ROWS,), generator=generator)
            ruled = (tokens[-1] * 5 + 1) % VOCABULARY
            tokens.append(torch.where(torch.rand(ROWS, generator=generator) < 0.1, noise, ruled))
        made.append(torch.stack(tokens, dim=1))
    return [batch for index, batch in enumerate(made) if index not in without]


class Batches:
    """A loader of global batches with a position that Lightning saves and restores."""

    def __init__(self, made: list[Tensor]) -> None:
        self.made = made
        self.position = 0

    def __len__(self) -> int:
        return len(self.made)

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.position % len(self), len(self)):
            self.position = index + 1
            yield self.made[index]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross entropy in fp32."""
    return functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())


def learning_rate(step: int) -> float:
    """A factor that is another at every step, so that a schedule that moved or stood still shows."""
    return min(1.0, (step + 1) / 5) * 0.97**step


def optimizer_for(parameters: Any) -> tuple[AdamW, LambdaLR]:
    """Fused AdamW and a step-interval schedule.

    The large eps is for 16-true: squares of gradients are 0 in fp16, and a smaller one would let that decide the run.
    """
    optimizer = AdamW(parameters, lr=LEARNING_RATE, eps=1e-2, fused=True)
    return optimizer, LambdaLR(optimizer, learning_rate)


class Language(LightningModule):
    """Each rank trains on its share of every global batch; on one rank, gradients of chosen steps are infinite."""

    #: how many training steps have begun in this process since a cell set it to 0
    steps_begun = 0

    def __init__(self, overflow_at: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.model = llama()
        self.overflow_at = overflow_at
        self.losses: list[float] = []
        self.lrs: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        Language.steps_begun += 1
        rank, world = self.global_rank, self.trainer.world_size
        tokens = batch.chunk(world)[rank]
        logits = self.model(input_ids=tokens).logits
        if self.trainer.global_step in self.overflow_at and rank == min(BAD_RANK, world - 1):
            # At the logits: a sharded parameter touched outside its unit, on one rank alone, would hang the others.
            logits = InfiniteGradient.apply(logits)
        loss = next_token_loss(logits, tokens)
        self.losses.append(loss.item())
        self.lrs.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizer_for(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
