"""Lightning's own LightningCLI with a plan among ``trainer.plugins``, by ``class_path``.

    python examples/05_lightning_cli.py fit --config examples/05_lightning_cli.yaml
    python examples/05_lightning_cli.py fit --config examples/05_lightning_cli.yaml --trainer.max_epochs 2
    python examples/05_lightning_cli.py fit --help

A misspelt key of the plan, at any depth, is refused before the model is built. With ``--trainer.strategy mp_fsdp2`` the
same file trains sharded.
"""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from lightning_mp.demo.text_windows import TextWindows


class Language(LightningModule):
    """A transformer over a vocabulary of ``vocab`` tokens; a batch is int64 of (batch, tokens)."""

    def __init__(self, vocab: int, width: int = 64, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.embedding, self.encoder = nn.Embedding(vocab, width), nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(width, vocab)

    def loss(self, batch: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(batch.shape[1] - 1, self.device)
        scores = self.head(self.encoder(self.embedding(batch[:, :-1]), mask, is_causal=True))
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr, fused=True)


if __name__ == "__main__":
    trainer = LightningCLI(Language, TextWindows, seed_everything_default=0).trainer
    plan, loss = trainer.precision_plugin, trainer.callback_metrics.get("val/loss", float("nan"))
    print(f"{plan.precision}: validation loss {loss:.2f}; {plan.applied_steps} steps, {plan.skipped_steps} skipped")
    print(f"config, metrics and audit: {trainer.log_dir}")
