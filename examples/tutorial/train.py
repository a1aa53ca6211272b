# train.py
import sys

from gpt import GPT, batches
from lightning.pytorch import Trainer

from lightning_mp import MixedPrecisionPlan
from lightning_mp.callbacks import TrainingHealth

if __name__ == "__main__":
    precision = sys.argv[1]
    plan = MixedPrecisionPlan(precision)
    health = TrainingHealth(run_dir=f"runs/{precision}")
    trainer = Trainer(
        plugins=[plan],
        callbacks=[health],
        max_steps=100,
        accelerator="cpu",
        logger=False,
    )
    trainer.fit(GPT(), batches())
    last = sum(row["train/loss"] for row in health.rows[-10:]) / 10
    steps = f"{plan.applied_steps} steps applied, {plan.skipped_steps} skipped"
    print(f"{precision}: loss {last:.3f}, {steps}")
