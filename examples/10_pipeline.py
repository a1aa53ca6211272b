"""Two pipeline stages in two processes, which it starts by itself: each holds half of the layers, the losses are one's.

    python examples/10_pipeline.py

The strategy cuts transformers' Llama by itself; a module of your own says what its stages are with pipeline_stage.
"""

import argparse
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mp import MixedPrecisionPlan, make_strategy


class Llama(LightningModule):
    """Learns Python byte by byte; a batch is int64 of (batch, 64)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, tie_word_embeddings=False, **sizes))

    def pipeline_batch(self, batch: Tensor) -> tuple[Tensor, Tensor]:  # what goes in, and what should come out
        return batch, batch

    def pipeline_loss(self, logits: Tensor, wanted: Tensor) -> Tensor:  # of a micro-batch, on the last stage
        return cross_entropy(logits[:, :-1].flatten(0, 1).float(), wanted[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # for runs in one piece
        return self.pipeline_loss(self.model(input_ids=batch).logits, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def fit(rows: int, batches: int, **where: object) -> tuple[Llama, Trainer]:
    seed_everything(0)
    windows, model = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, 64, 64)[:640], Llama()
    where |= {"accelerator": "cuda" if torch.cuda.device_count() > 1 else "cpu", "enable_checkpointing": False}
    trainer = Trainer(max_steps=40, accumulate_grad_batches=batches, logger=False, log_every_n_steps=1, **where)
    trainer.fit(model, DataLoader(windows, rows))
    return model, trainer


if __name__ == "__main__":
    plan = MixedPrecisionPlan("16-mixed", pins={"*norm*": "fp32"})
    model, trainer = fit(16, 1, strategy=make_strategy("pipeline", plan, stages=2, microbatches=4), devices=2)
    held = [name for name, parameter in model.named_parameters() if parameter.untyped_storage().size() > 4]
    print(f"rank {model.global_rank} holds {held[0]} to {held[-1]}", flush=True)
    weights, loss = trainer.strategy.lightning_module_state_dict(), float(trainer.callback_metrics["train_loss"])
    if model.global_rank == 0:  # where the weights of all stages are now
        whole = fit(4, 4, plugins=[MixedPrecisionPlan.from_policy(plan.policy)], devices=1)[0].state_dict()
        apart = max(float((weights[name] - whole[name].cpu()).abs().max()) for name in whole)
        print(f"loss after 40 steps: {loss:.4f}; weights {apart:.1e} apart from one's")
