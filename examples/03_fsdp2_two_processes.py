"""FSDP2 on two processes, which it starts by itself: each holds half of the model, and the losses are those of one.

    python examples/03_fsdp2_two_processes.py

The strategy is a name, the LightningModule has no configure_model. Where there are no two GPUs it runs on the CPU.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mp import MixedPrecisionPlan


class Llama(LightningModule):
    """Learns Python byte by byte; a batch is int64 of (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")))
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:  # every 16 windows are one batch, however many processes share it
        windows = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, 64, 64)
        rank, world = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(windows, 16 // world, sampler=DistributedSampler(windows, world, rank))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def fit(**where: object) -> Llama:
    seed_everything(0)
    model, plan = Llama(), MixedPrecisionPlan("16-mixed", pins={"*norm*": "fp32"})
    where |= {"accelerator": "cuda" if torch.cuda.device_count() > 1 else "cpu", "enable_checkpointing": False}
    Trainer(plugins=[plan], max_steps=40, gradient_clip_val=1.0, logger=False, **where).fit(model)
    return model


if __name__ == "__main__":
    halves = fit(strategy="mp_fsdp2", devices=2)
    held = sum(parameter.to_local().numel() for parameter in halves.parameters())
    size = sum(parameter.numel() for parameter in halves.parameters())
    print(f"rank {halves.global_rank} holds {held:,} of {size:,} parameters, {held / size:.1%}", flush=True)
    if halves.global_rank == 0:
        whole = fit(devices=1)
        apart = max(abs(a - b) for a, b in zip(halves.losses, whole.losses, strict=True))
        print(f"loss after 40 steps: {halves.losses[-1]:.4f} on two, {whole.losses[-1]:.4f} on one; {apart:.1e} apart")
