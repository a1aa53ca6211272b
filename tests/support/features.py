"""What a user's run may do beside training, under any strategy, to be compared with one device on the same batches."""

from __future__ import annotations

import math
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import MixedPrecisionPlan, PlanError, make_strategy
from lightning_mp.compat.lightning import LightningModule, MisconfigurationException, Trainer
from support import sharded
from support.running import trainer as quiet_trainer

FEATURES, HIDDEN, ROWS, STEPS, RATE = 16, 32, 8, 8, 2e-2
#: what is refused in another exception says so: this package's faults in a step, and Lightning
REFUSING = ("with ZeRO", "does not support", "not supported", "only supports", "which is None here")


def data(steps: int = STEPS, rows: int = ROWS) -> DataLoader[Any]:
    """Global batches of a regression, in a fixed order."""
    x = torch.randn(steps * rows, FEATURES, generator=torch.Generator().manual_seed(7))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=rows)


class Net(LightningModule):
    """A backbone and a head; each rank trains on its rows of the global batch."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.LayerNorm(HIDDEN), nn.GELU())
        self.middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())
        self.head = nn.Linear(HIDDEN, 1)
        self.learning_rate, self.batch_size, self.seen = RATE, ROWS, {}
        for name, value in options.items():
            setattr(self, name, value)

    #: what an option may replace
    make_optimizer: Callable[[Any], Any] = staticmethod(partial(torch.optim.AdamW, lr=RATE, eps=1e-2))
    make_scheduler: Any = None
    monitor: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.backbone(x)))

    def mine(self, batch: Any) -> Any:
        """This rank's rows."""
        return [tensor.chunk(self.trainer.world_size)[self.global_rank] for tensor in batch]

    def loss(self, batch: Any) -> Tensor:
        x, y = self.mine(batch)
        return (self(x).float() - y).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer([p for p in self.parameters() if p.requires_grad])
        if self.make_scheduler is None:
            return optimizer
        schedule = {"scheduler": self.make_scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule | ({"monitor": self.monitor} if self.monitor else {})}


@dataclass
class Host:
    """Trainers of one strategy under one mode."""

    strategy: str
    mode: str
    folder: Path

    def plan(self, **options: Any) -> MixedPrecisionPlan:
        return MixedPrecisionPlan(self.mode, **options)

    def trainer(self, plan: Any = None, **options: Any) -> Trainer:
        plan = plan or self.plan(**options.pop("plan_options", {}))
        own = options.pop("strategy_options", {}).get(self.strategy, {})
        if self.strategy != "single":
            made = make_strategy(self.strategy, plan, timeout=timedelta(seconds=60), **own)
            options |= {"strategy": made, "devices": 2, "use_distributed_sampler": False}
        return quiet_trainer(plugins=[plan], default_root_dir=str(self.folder), **options)

    def fit(self, module: LightningModule, *, loader: Any = None, ckpt_path: Any = None, **options: Any) -> Any:
        """Train, and what is left: weights and buffers in full."""
        trainer = self.trainer(**options)
        trainer.fit(module, data() if loader is None else loader, ckpt_path=ckpt_path)
        return left(trainer, module)


def left(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    """What a fit left behind."""
    plan: Any = trainer.precision_plugin
    found: dict[str, Any] = {"weights": sharded.whole(module)}
    found["counts"] = (plan.applied_steps, plan.skipped_steps, trainer.global_step)
    if trainer.optimizers:
        found["lrs"] = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups][:1]
    return found


FEATURE: dict[str, Callable[[Host], dict[str, Any]]] = {}


def feature(run: Callable[[Host], dict[str, Any]]) -> Callable[[Host], dict[str, Any]]:
    """Put it into the table under its name."""
    FEATURE[run.__name__] = run
    return run


@dataclass(frozen=True)
class Ran:
    """One feature on every rank: what it left, or how it ended."""

    name: str
    strategy: str
    mode: str
    folder: str

    def run(self) -> dict[str, Any]:
        import torch.distributed as dist

        from support import feature_hooks, feature_loops, feature_weights  # noqa: F401  # they fill the table

        if self.strategy != "single" and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        try:
            with warnings.catch_warnings():  # what a warning says that a result is not: as good as refused
                warnings.filterwarnings("error", message=".*which is None here")
                return FEATURE[self.name](Host(self.strategy, self.mode, Path(self.folder)))
        except (PlanError, MisconfigurationException, NotImplementedError) as error:
            return {"refused": str(error)}
        except Exception as error:
            refused = any(word in str(error) for word in REFUSING)
            return {"refused": str(error)} if refused else {"failed": traceback.format_exc()}


def difference(one: Any, other: Any, path: str = "") -> tuple[float, str]:
    """The largest relative distance of two nested results, and where; of tensors by the larger one's length."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return math.inf, f"{path}: {sorted(set(one) ^ set(other))[:4]} on one side"
        return max((difference(one[key], other[key], f"{path}.{key}") for key in one), default=(0.0, ""))
    far = math.inf if isinstance(one, Tensor) or one != other else 0.0
    if isinstance(one, Tensor) and one.shape == other.shape:
        lengths = one.double().norm(), other.double().norm(), torch.tensor(1e-6)
        far = float((one.double() - other.double()).norm() / max(lengths))
    elif isinstance(one, float):
        far = abs(one - other) / max(abs(one), abs(other), 1e-9)
    return math.inf if math.isnan(far) else far, path if isinstance(one, Tensor) else f"{path}: {one!r} and {other!r}"
