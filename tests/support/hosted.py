"""What a program does with this package under one of Lightning's names, for programs that differ in their imports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from support.models import Regression, batches
from support.running import fit

#: what the program has imported, by the names it gave them
given: Any = SimpleNamespace()
#: each callback, and what it is made with
CALLBACKS: dict[str, Any] = {
    "ActivationCheckpointing": ["net"],
    "DtypePinning": [{"LayerNorm": "bf16"}],
    "EnableTF32": ["high"],
    "LossScaleMonitor": [],
    "NonFiniteGuard": [],
    "PrecisionAudit": [],
    "TrainingHealth": [],
}
STRATEGIES: dict[str, Any] = {
    "mp_ddp": lambda plan: "mp_ddp",
    "mp_fsdp2": lambda plan: "mp_fsdp2",
    "make_strategy('ddp')": lambda plan: given.make_strategy("ddp", plan),
    "make_strategy('fsdp2')": lambda plan: given.make_strategy("fsdp2", plan),
}
CLI = """
trainer:
  accelerator: cpu
  max_steps: 3
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks: [{class_path: lightning_mp.callbacks.LossScaleMonitor}]
"""


class Net(Regression):
    """A model of the program's own copy."""

    def __init__(self) -> None:
        super().__init__()
        assert isinstance(self, given.pl.LightningModule)

    def train_dataloader(self) -> Any:
        return batches()


def steps(strategy: Any) -> list[float]:
    """The losses of eight steps, one of which overflows, under a plan."""
    plan = given.MixedPrecisionPlan(
        "16-mixed", pins={"LayerNorm": "fp32", "net.3": "fp32"}, loss_scaling={"init_scale": 256}
    )
    module = Regression(overflow_at=(2,))
    runner = fit(module, plugins=[plan], strategy=strategy(plan))
    assert type(runner) is given.pl.Trainer
    assert (plan.applied_steps, plan.skipped_steps) == (7, 1)
    return module.losses


def resumed(folder: Path) -> tuple[list[float], list[str]]:
    """The losses of a second epoch after a checkpoint, and under which key the plan's state is in that."""
    plan = given.MixedPrecisionPlan("16-mixed")
    path = folder / "step.ckpt"
    fit(Regression(), plugins=[plan], strategy="mp_ddp").save_checkpoint(path)
    keys = [key for key in torch.load(path, weights_only=False) if "Plan" in key]
    return second_epoch(path), keys


def second_epoch(path: Path) -> list[float]:
    """The losses of a second epoch, from a checkpoint that either copy wrote."""
    plan, module = given.MixedPrecisionPlan("16-mixed"), Regression()
    fit(module, plugins=[plan], ckpt_path=path, max_epochs=2)
    assert plan.applied_steps + plan.skipped_steps == 16
    return module.losses


def by_command_line(folder: Path) -> list[float]:
    """Losses under the copy's own LightningCLI."""
    config = folder / "trainer.yaml"
    config.write_text(CLI)
    own = f"--trainer.strategy=mp_ddp --trainer.plugins=lightning_mp.MixedPrecisionPlan --config={config}".split()
    cli = given.LightningCLI(Net, args=["fit", *own], save_config_callback=None)
    assert isinstance(cli.trainer.precision_plugin, given.MixedPrecisionPlan)
    assert type(cli.trainer.strategy).__name__ == "PlanDDPStrategy"
    return cli.model.losses


def main(names: dict[str, Any], folder: str, checkpoint: str | None = None) -> None:
    """Print everything that a program with ``names`` sees of this package, as JSON: losses, by what was used."""
    vars(given).update(names)
    runs = everything(Path(folder))
    runs["of another"] = second_epoch(Path(checkpoint)) if checkpoint else None
    print(json.dumps(runs))


def everything(folder: Path) -> dict[str, Any]:
    """Strategies, callbacks, checkpoints, LightningCLI and the rest."""
    runs = {name: steps(make) for name, make in STRATEGIES.items()}
    for name, arguments in CALLBACKS.items():
        module = Regression()
        fit(module, precision="32-true", callbacks=[getattr(given, name)(*arguments)])
        runs[name] = module.losses
    runs["resumed"], keys = resumed(folder)
    runs["LightningCLI"] = by_command_line(folder)
    plan, module = given.MixedPrecisionPlan("bf16-mixed"), Regression()
    return {
        "runs": runs,
        "keys": keys,
        "others": [
            repr(given.doctor(module.eval(), plan)),
            given.audit(module).ok,
            sorted(given.trainer_kwargs(plan, strategy="ddp")),
        ],
        "copies": sorted({"lightning.pytorch", "pytorch_lightning"} & sys.modules.keys()),
    }
