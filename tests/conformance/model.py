"""What cells of plans and optimizers train: a tiny Llama of random weights, on made-up text."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from conformance.rows import Row
from lightning_mp.compat.lightning import LightningModule
from support import hf
from support.models import InfiniteGradient

VOCABULARY, LENGTH, ROWS = 128, 12, 8
STEPS = 20
CLIP = 0.5
BAD_RANK = 1


def llama() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": LENGTH}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    with torch.random.fork_rng():
        # eager attention: its matrix products can be seen one by one
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
        return hf.llama(**sizes, **heads, **ids, use_cache=False)


def text(generator: torch.Generator) -> Tensor:
    """Each token is 5 times the one before plus 1, but for one in ten."""
    tokens = [torch.randint(VOCABULARY, (ROWS,), generator=generator)]
    for _ in range(LENGTH - 1):
        noise = torch.randint(VOCABULARY, (ROWS,), generator=generator)
        ruled = (tokens[-1] * 5 + 1) % VOCABULARY
        tokens.append(torch.where(torch.rand(ROWS, generator=generator) < 0.1, noise, ruled))
    return torch.stack(tokens, dim=1)


def batches(steps: int = STEPS, without: tuple[int, ...] = ()) -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    made = [text(generator) for _ in range(steps)]
    return [batch for index, batch in enumerate(made) if index not in without]


def next_token(model: nn.Module, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return model(input_ids=tokens).logits[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, -2), wanted.flatten())


def learning_rate(step: int) -> float:
    """A factor that is another at every step, so that a schedule that moved or stood still shows."""
    return min(1.0, (step + 1) / 5) * 0.97**step


def optimizer_for(row: Row, parameters: Any) -> tuple[Optimizer, LambdaLR]:
    optimizer = row.stepper.optimizer(parameters)
    return optimizer, LambdaLR(optimizer, learning_rate)


def model_of(row: Row) -> nn.Module:
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.requires_grad and row.stepper.takes(parameter))
    return model


class Learner(LightningModule):
    """Each rank trains on its share of every global batch; on one rank, gradients of chosen steps are infinite."""

    #: how many training steps have begun in this process since a cell set it to 0
    steps_begun = 0

    def __init__(self, row: Row, overflow_at: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.row = row
        self.model = model_of(row)
        self.overflow_at = overflow_at
        #: by batch: one that is run twice counts once
        self.losses: dict[int, float] = {}
        self.lrs: dict[int, float] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        Learner.steps_begun += 1
        rank, world = self.global_rank, self.trainer.world_size
        logits, wanted = next_token(self.model, batch.chunk(world)[rank])
        if self.trainer.global_step in self.overflow_at and rank == min(BAD_RANK, world - 1):
            # At the logits: a sharded parameter touched outside its unit, on one rank alone, would hang the others.
            logits = InfiniteGradient.apply(logits)
        loss = loss_of(logits, wanted)
        self.losses[batch_idx] = loss.item()
        self.lrs[batch_idx] = float(self.trainer.optimizers[0].param_groups[0]["lr"])  # a tensor changes in place
        return loss

    def pipeline_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        Learner.steps_begun += 1
        return batch, batch

    def pipeline_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.trainer.global_step in self.overflow_at:
            output = InfiniteGradient.apply(output)
        return loss_of(output[:, :-1], target[:, 1:])

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.lrs[batch_idx] = float(self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.losses.setdefault(batch_idx, float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer, schedule = optimizer_for(self.row, self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
