# two.py
import sys

from gpt import GPT, batches
from lightning.pytorch import Trainer

from lightning_mp import MixedPrecisionPlan

if __name__ == "__main__":
    strategy, steps, resume = (
        sys.argv[1],
        int(sys.argv[2]),
        sys.argv[3] if len(sys.argv) > 3 else None,
    )
    plan = MixedPrecisionPlan("bf16-mixed", pins={"norms": "fp32"})
    options = {
        "accelerator": "cpu",
        "devices": 2,
        "logger": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        plugins=[plan], strategy=strategy, max_steps=steps, **options
    )
    trainer.fit(GPT(), batches(), ckpt_path=resume)
    trainer.save_checkpoint(f"{strategy}.ckpt")
    if trainer.is_global_zero:
        applied = plan.applied_steps
        print(f"{strategy}: {applied} steps applied, saved {strategy}.ckpt")
