# broken.py
from contextlib import suppress

from gpt import GPT, batches
from lightning.pytorch import Trainer

from lightning_mp import MixedPrecisionPlan, NonFiniteError
from lightning_mp.callbacks import TrainingHealth


def fit(name, plan, module, loader):
    health = TrainingHealth(run_dir=f"runs/{name}")
    trainer = Trainer(
        plugins=[plan],
        callbacks=[health],
        max_steps=30,
        accelerator="cpu",
        logger=False,
    )
    with suppress(NonFiniteError):  # a run that applied no step ends so
        trainer.fit(module, loader)
    print(f"--- {name}: {plan.skipped_steps} of 30 steps skipped")
    for event in health.events[:2]:
        print(event.severity, event)


fit("bad_row", MixedPrecisionPlan("bf16-mixed"), GPT(), batches(bad_row=100))

module = GPT()
module.head.weight.data *= 1e6  # its output does not fit into fp16
fit("bad_head", MixedPrecisionPlan("16-mixed"), module, batches())

module = GPT()
module.head.weight.data *= 1e6
fit(
    "pinned_head",
    MixedPrecisionPlan("16-mixed", pins={"head": "fp32"}),
    module,
    batches(),
)
