"""bf16 for a LightningModule as it is, with its norms and its head in fp32: one argument of the Trainer.

    python examples/01_drop_in_bf16.py

A small Llama learns Python from the standard library's source. The table says, module by module, what was declared and
what was seen: weights, gradients and optimizer state in fp32, products in bf16, and what is pinned in fp32 throughout.
"""

import logging

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mp import MixedPrecisionPlan, audit
from lightning_mp.callbacks import PrecisionAudit
from lightning_mp.demo.text_windows import TextWindows

PLAN = MixedPrecisionPlan("bf16-mixed", pins={"*norm*": "fp32", "lm_head": "fp32"})


class Llama(LightningModule):
    """Nothing in here knows of precision; a batch is int64 of (batch, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, **sizes))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # else PrecisionAudit shows its table as well
    seed_everything(0)
    trainer = Trainer(
        plugins=[PLAN],
        callbacks=[PrecisionAudit()],
        max_epochs=1,
        limit_train_batches=80,
        devices=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(Llama(), TextWindows(vocab=512, context=64, batch_size=8))
    print(f"validation loss {trainer.callback_metrics['val_loss']:.2f} after 80 steps; 6.24 is chance")
    print(audit(trainer).to_markdown())
