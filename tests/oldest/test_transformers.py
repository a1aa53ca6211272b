"""A transformers model with LoRA adapters trains under a plan that pins its norms and checkpoints its blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_mp import Checkpointing, MixedPrecisionPlan, Pin

pytestmark = [pytest.mark.slow]


class Llama(LightningModule):
    """Two small blocks; the losses of its steps are kept."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
        )
        self.model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        self.losses: list[float] = []

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.05)


def test_a_llama_with_lora_trains_pinned_and_checkpointed() -> None:
    plan = MixedPrecisionPlan(
        "bf16-mixed", pins=[Pin("LlamaRMSNorm", "fp32")], checkpointing=Checkpointing(modules="LlamaDecoderLayer")
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    module = Llama()
    tokens = torch.arange(16) % 8
    trainer = Trainer(accelerator="cpu", devices=1, plugins=[plan], max_epochs=1, enable_model_summary=False, **quiet)
    trainer.fit(module, DataLoader([tokens] * 6, batch_size=2))
    assert plan.applied_steps == 3
    assert module.losses[-1] < module.losses[0]
