"""What to say where a plan is given to something that cannot run it, or is used outside of a run."""

from __future__ import annotations

from lightning_mp.errors import Fault

IN_FABRIC = Fault(
    "Fabric(plugins=[MixedPrecisionPlan(...)]), or a backward pass without a Trainer",
    "Trainer(plugins=[plan]): a plan follows the hooks of a Trainer's step",
    "use a Trainer, or Fabric(precision=...) without the plan",
)
AMONG_CALLBACKS = Fault("callbacks=[MixedPrecisionPlan(...)]", "plugins=[plan]", "write Trainer(plugins=[plan])")
OUTSIDE_OF_A_RUN = Fault(
    "an optimizer step outside of a run, as trainer.fit_loop makes one after fit",
    "steps within trainer.fit, which attaches the plan to the model and takes it off at its end",
    "call trainer.fit(...) again",
)
