"""Runs that PrecisionAudit watches on two ranks; the tests look at what came back."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_mp import make_strategy
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.monitor.audit import audit
from support.language import Language, llama, tokens
from support.models import Regression
from support.oracles import plan_for
from support.running import fit, trainer
from support.sharded import ddp, refused


@dataclass(frozen=True)
class Audited:
    """Two audited steps on a small Llama."""

    strategy: str
    mode: str
    folder: Path
    pins: dict[str, str] = field(default_factory=dict)
    checkpointing: str | None = None

    def run(self) -> dict[str, Any]:
        callback = PrecisionAudit(steps=2, on_mismatch="raise", run_dir=self.folder)
        plan = plan_for(self.mode, pins=self.pins, checkpointing=self.checkpointing)
        own = {} if "deepspeed" in self.strategy else {"process_group_backend": "gloo"}
        strategy = make_strategy(self.strategy, plan, timeout=timedelta(seconds=60), **own)
        runner = trainer(callbacks=[callback], max_steps=2, plugins=[plan], strategy=strategy, devices=2)
        runner.fit(Language(llama()), tokens())
        assert callback.report is not None
        later = audit(runner)
        return {
            "rows": {row.module: row.to_dict() for row in callback.rows},
            "text": str(callback.report),
            "later": later.ok or str(later),
        }


class CastOnOneRank(Regression):
    """On rank 1 the last layer runs outside autocast."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[:3](x)
        with torch.autocast("cpu", enabled=self.global_rank == 0, dtype=torch.bfloat16):
            return (self.net[3](hidden.float()).float() - y).pow(2).mean()


class Compressed(Regression):
    """It registers a compressing hook where nobody declared one."""

    def on_fit_start(self) -> None:
        self.trainer.model.register_comm_hook(None, fp16_compress_hook)


@dataclass(frozen=True)
class Differing:
    """What each rank is told of a rank that differs, of stock DDP in half precision, and of a hook that compresses."""

    folder: Path

    def run(self) -> dict[str, Any]:
        callback, plan = PrecisionAudit(1, "raise", self.folder / "a"), plan_for("bf16-mixed")
        found: dict[str, Any] = {
            "one rank": refused(lambda: fit(CastOnOneRank(), callbacks=[callback], plugins=[plan], **ddp()))
        }
        stock = PrecisionAudit(run_dir=self.folder / "c")
        fit(Regression(), callbacks=[stock], precision="bf16-true", **ddp())
        found["stock"] = [(row.reduce, row.ok) for row in stock.rows]
        compressed = PrecisionAudit(run_dir=self.folder / "d")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(Compressed(), callbacks=[compressed], precision="32-true", **ddp())
        found["behind"] = [(row.reduce, row.ok) for row in compressed.rows]
        found["told"] = [str(warning.message) for warning in told if "PrecisionAudit" in str(warning.message)]
        return found
