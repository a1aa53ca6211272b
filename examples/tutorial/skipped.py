# skipped.py
from gpt import GPT, batches
from lightning.pytorch import Trainer

from lightning_mp import LossScaling, MixedPrecisionPlan
from lightning_mp.callbacks import TrainingHealth

plan = MixedPrecisionPlan(
    "16-mixed", loss_scaling=LossScaling(init_scale=2**24)
)
health = TrainingHealth(run_dir="runs/skipped")
Trainer(
    plugins=[plan],
    callbacks=[health],
    max_steps=12,
    accelerator="cpu",
    logger=False,
).fit(GPT(), batches())
for row in health.rows[:8]:
    print(
        row["step"],
        row["health/loss_scale"],
        row["health/skipped_steps"],
        round(row["health/lr"], 6),
    )
