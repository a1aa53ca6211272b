"""What an idiom runs on: stock Lightning or a plan, on one device or in two processes, and what is kept of the run."""

import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_mp import PlanError, make_strategy
from support import sharded
from support.oracles import plan_for, stock_for
from support.running import trainer as quiet_trainer

WIDTH = 8
ROWS = 4
STEPS = 6
WAIT = timedelta(seconds=60)
NAMES = {"ddp": "ddp", "fsdp2": "fsdp2", "zero2": "deepspeed_zero2"}


class Recorder(Callback):
    """Keep each batch's loss, and the number of batches that have ended."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *rest: Any) -> None:
        self.batches += 1
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self.losses.append(float(loss))


@dataclass
class Host:
    """Trainers for one cell of an idiom: stock Lightning's or a plan's."""

    strategy: str
    mode: str
    folder: Path
    stock: bool
    kept: dict[str, Any] = field(default_factory=dict)
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def rank(self) -> int:
        return 0 if self.strategy == "single" else sharded.rank()

    def data(self, steps: int = STEPS, rows: int = ROWS, seed: int = 7, same_rows: bool = False) -> DataLoader[Any]:
        """Return batches of rows and their sums; each rank has rows of its own unless ``same_rows``."""
        generator = torch.Generator().manual_seed(seed if same_rows else seed + self.rank)
        x = torch.randn(steps * rows, WIDTH, generator=generator)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True) / 2), batch_size=rows)

    def trainer(
        self, plan: Any = None, strategy_options: Any = None, unused: bool = False, wrap: Any = "Block", **options: Any
    ) -> Trainer:
        """Return a Trainer. ``unused`` says that a step leaves parameters without a gradient.

        ``wrap`` names the classes that FSDP2 shards as units, and ``strategy_options`` what else a strategy takes.
        """
        callbacks = [*options.pop("callbacks", []), self.recorder]
        options = {"default_root_dir": str(self.folder), "callbacks": callbacks, **options}
        if self.stock:
            chosen = stock_for(self.mode)
            chosen["plugins"] = [*chosen.get("plugins", []), *options.pop("plugins", [])]
            if self.strategy != "single":
                ddp = DDPStrategy(process_group_backend="gloo", timeout=WAIT, find_unused_parameters=unused)
                options |= sharded.on(ddp)
            return quiet_trainer(**chosen, **options)
        plan = plan_for(self.mode, **(plan or {}))
        options["plugins"] = [plan, *options.pop("plugins", [])]
        if self.strategy != "single":
            own: dict[str, Any] = {"timeout": WAIT}
            if self.strategy == "ddp":
                own["find_unused_parameters"] = unused
            if self.strategy == "fsdp2" and wrap:
                own["wrap"] = wrap
            own |= (strategy_options or {}).get(self.strategy, {})
            options |= sharded.on(make_strategy(NAMES[self.strategy], plan, **own))
        return quiet_trainer(**options)

    def fit(self, module: LightningModule, data: Any = None, same_rows: bool = False, **options: Any) -> Trainer:
        """Train the module, and keep what the run left.

        ``data=False`` says that the module has a loader of its own. Other options are those of :meth:`trainer`,
        ``val_dataloaders``, ``ckpt_path`` and ``weights_only``.
        """
        fitting = {key: options.pop(key) for key in ("val_dataloaders", "ckpt_path", "weights_only") if key in options}
        trainer = self.trainer(**options)
        if data is not False:
            fitting["train_dataloaders"] = self.data(same_rows=same_rows) if data is None else data
        trainer.fit(module, **fitting)
        self.keep(trainer, module)
        return trainer

    def keep(self, trainer: Trainer, module: LightningModule) -> None:
        """Keep weights, buffers, losses, metrics, counts, and what the idiom noted in ``module.seen``."""
        self.kept["weights"] = sharded.whole(module)
        self.kept["losses"] = list(self.recorder.losses)
        self.kept["seen"] = getattr(module, "seen", {})
        self.kept["global_step"] = trainer.global_step
        self.kept["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}


def ran(run: Callable[[Host], None], strategy: str, mode: str, folder: str, stock: bool) -> dict[str, Any]:
    """Return what one cell left, or ``{"refused": text}``, or ``{"failed": traceback}``.

    A PlanError is a refusal. Any other exception is a failure, except where the caller expects its words.
    """
    import torch.distributed as dist

    if strategy != "single" and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=WAIT)
    torch.manual_seed(0)
    host = Host(strategy, mode, Path(folder), stock)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message=".*is deprecated")
        # a result does not show what this warning says, so it is as good as a refusal
        warnings.filterwarnings("error", message=".*which is None here")
        try:
            run(host)
        except Exception as error:
            kind = "refused" if isinstance(error, PlanError) else "failed"
            words = str(error) if kind == "refused" else traceback.format_exc()
            return {kind: words, "message": str(error), "batches": host.recorder.batches}
    return {**host.kept, "said": sorted({str(each.message) for each in said})}
