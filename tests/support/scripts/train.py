"""A user's script, as a launcher starts it: ``python train.py --strategy fsdp2 --out FOLDER``."""

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import LossScaling, MixedPrecisionPlan, make_strategy, trainer_kwargs

FEATURES = 16


class Model(LightningModule):
    def __init__(self, fail: str, out: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        self.fail, self.out = fail, out

    def planned(self, where: str) -> None:
        """Raise, if here is the place; some time after the other rank went on to wait."""
        if self.fail == where and self.global_rank == 1:
            time.sleep(1)
            (self.out / "failed").touch()
            raise KeyError("planned")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.planned("step")
        return (self.net(batch[0]).float() - batch[1]).pow(2).mean()

    def on_train_end(self) -> None:
        """Say what this rank saw: what launches others may be another process than they."""
        seen = {
            "rank": self.trainer.global_rank, "world": self.trainer.world_size, "steps": self.trainer.global_step,
            "environment": type(self.trainer.strategy.cluster_environment).__name__, "weights": _whole(self),
        }  # fmt: skip
        (self.out / f"{self.trainer.global_rank}.json").write_text(json.dumps(seen))

    def configure_optimizers(self) -> Any:
        self.planned("setup")
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def _data() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(64, FEATURES, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def _trainer(given: argparse.Namespace) -> Trainer:
    plan = MixedPrecisionPlan(
        "16-mixed",
        loss_scaling=LossScaling(init_scale=256.0),
        pins={"no such module": "fp32"} if given.fail == "plan" else {},
    )
    options = {"process_group_backend": "gloo", "timeout": timedelta(seconds=120)}
    if given.start_method is not None:
        options["start_method"] = given.start_method
    strategy = make_strategy(given.strategy, plan, **options)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    own = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "gradient_clip_val": 1.0}
    return Trainer(**trainer_kwargs(plan, strategy=strategy, **own, **quiet))


def _whole(module: LightningModule) -> float:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in module.parameters():
        held = parameter.detach()
        total += (held.full_tensor() if hasattr(held, "full_tensor") else held).double().abs().sum()
    return total.item()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--start-method")
    parser.add_argument("--fail", choices=("nowhere", "plan", "setup", "step"), default="nowhere")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    module, trainer = Model(given.fail, given.out), _trainer(given)
    trainer.fit(module, _data())
    (given.out / f"{trainer.global_rank}.after").write_text(str(_whole(module)))
    if torch.distributed.is_initialized():  # threads of a group that outlive the interpreter may abort the process
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
