# pin.py
from gpt import GPT, batches
from lightning.pytorch import Trainer

from lightning_mp import MixedPrecisionPlan
from lightning_mp.callbacks import PrecisionAudit

for pins in ({}, {"norms": "fp32", "head": "fp32"}):
    audit = PrecisionAudit(run_dir=f"runs/pins_{len(pins)}")
    plan = MixedPrecisionPlan("bf16-true", pins=pins)
    Trainer(
        plugins=[plan],
        callbacks=[audit],
        max_steps=1,
        accelerator="cpu",
        logger=False,
    ).fit(GPT(), batches())
    print(audit.report.to_text())
