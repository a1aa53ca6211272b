"""FP8 beside bf16: what is converted and why the rest is not, the losses of both, and the audit that proves it.

    python examples/09_fp8.py

On a CPU this shows numbers and no speed; emulated there, since its own FP8 products take a second for a layer.
small="convert" is for this small Llama alone: its layers are slower in FP8.
"""

import logging

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_mp import FP8, MixedPrecisionPlan, audit
from lightning_mp.callbacks import PrecisionAudit
from lightning_mp.demo.text_windows import TextWindows

PLANS = {
    "bf16": MixedPrecisionPlan("bf16-mixed"),
    "fp8": MixedPrecisionPlan("fp8-mixed", fp8=FP8(small="convert", emulate=not torch.cuda.is_available())),
}


class Llama(LightningModule):
    """Nothing in here knows of precision; a batch is int64 of (batch, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=512, use_cache=False, **sizes)).train()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    for name, plan in PLANS.items():
        seed_everything(0)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "devices": 1}
        quiet |= {"enable_model_summary": False, "limit_train_batches": 30, "limit_val_batches": 5}
        trainer = Trainer(plugins=[plan], callbacks=[PrecisionAudit()], max_epochs=1, **quiet)
        trainer.fit(Llama(), TextWindows(vocab=512, context=64, batch_size=8))
        print(f"{name}: validation loss {trainer.callback_metrics['val_loss']:.3f} after 30 steps; 6.24 is chance")
    for layer in PLANS["fp8"].fp8_layers:
        print(f"{layer.name:40} {layer.shape!s:12} {layer.reason or 'fp8'}")
    print(audit(trainer).to_markdown())
