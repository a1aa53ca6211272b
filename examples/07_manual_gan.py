"""Manual optimization with two optimizers under fp16: a GAN learns to draw eight spots on a ring.

    python examples/07_manual_gan.py

The module is written as for fp32. Both optimizers share one loss scale, gradients are in their true units when they are
clipped (a norm of about 1, not of 32,768), and a step that overflows changes nothing.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn, optim
from torch.nn.functional import softplus

from lightning_mp import LossScaling, MixedPrecisionPlan

SPOTS = torch.view_as_real(torch.polar(torch.ones(8), torch.arange(8) * torch.pi / 4))  # (8, 2)
PLAN = MixedPrecisionPlan("16-mixed", loss_scaling=LossScaling(growth_interval=100))


class GAN(LightningModule):
    """A batch is fp32 of (batch, 2): points around the spots."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Sequential(nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
        self.generator = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
        self.norms: list[Tensor] = []

    def training_step(self, real: Tensor, batch_idx: int) -> None:
        fake = self.generator(torch.randn(len(real), 8, device=self.device))
        self.update(0, self.critic, softplus(-self.critic(real)) + softplus(self.critic(fake.detach())))
        self.update(1, self.generator, softplus(-self.critic(fake)))

    def update(self, index: int, part: nn.Module, losses: Tensor) -> None:
        optimizer = self.optimizers()[index]
        optimizer.zero_grad()
        self.manual_backward(losses.mean())
        self.norms.append(nn.utils.clip_grad_norm_(part.parameters(), 1.0))
        optimizer.step()

    def configure_optimizers(self) -> list[optim.Optimizer]:
        return [optim.Adam(part.parameters(), 2e-3, (0.0, 0.9), fused=True) for part in (self.critic, self.generator)]


def quality(gan: GAN) -> str:
    distance, nearest = torch.cdist(gan.generator(torch.randn(4000, 8)), SPOTS).min(dim=1)
    drawn = nearest[distance < 0.3].bincount(minlength=8)
    return f"{drawn.sum() / 4000:.0%} of 4,000 samples on a spot, {(drawn > 100).sum()} of 8 spots drawn"


if __name__ == "__main__":
    seed_everything(0)
    gan, points = GAN(), SPOTS.repeat(2048, 1) + 0.1 * torch.randn(16384, 2)
    trainer = Trainer(plugins=[PLAN], max_epochs=8, devices=1, logger=False, enable_checkpointing=False)
    print("before:", quality(gan))
    trainer.fit(gan, torch.utils.data.DataLoader(points, batch_size=256, shuffle=True))
    print("after:", quality(gan))
    print(f"median gradient norm {torch.stack(gan.norms).nanmedian():.2f}, loss scale {PLAN.scaler.get_scale():.0f}")
    print(f"optimizer steps: {PLAN.applied_steps} applied, {PLAN.skipped_steps} skipped")
