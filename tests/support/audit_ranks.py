"""Runs that PrecisionAudit watches on two ranks; the tests look at what came back."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_mp import PlanError, make_strategy
from lightning_mp.callbacks.precision_audit import PrecisionAudit
from lightning_mp.monitor.audit import audit
from support.language import Language, llama, tokens
from support.models import Regression
from support.oracles import plan_for
from support.running import fit, trainer

#: strategy, precision, pins, checkpointing
Run = tuple[str, str, dict[str, str] | None, str | None]


def _on(strategy: str, plan: Any) -> dict[str, Any]:
    own = {} if "deepspeed" in strategy else {"process_group_backend": "gloo"}
    made = make_strategy(strategy, plan, timeout=timedelta(seconds=60), **own)
    return {"plugins": [plan], "strategy": made, "devices": 2}


def trained(folder: Path, runs: list[Run]) -> list[dict[str, Any]]:
    """Two audited steps of each run on a small Llama."""
    return [_trained(folder / str(place), *run) for place, run in enumerate(runs)]


def _trained(folder: Path, strategy: str, mode: str, pins: Any, block: str | None) -> dict[str, Any]:
    callback = PrecisionAudit(steps=2, on_mismatch="raise", run_dir=folder)
    runner = trainer(callbacks=[callback], max_steps=2, **_on(strategy, plan_for(mode, pins=pins, checkpointing=block)))
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


def _ddp() -> dict[str, Any]:
    strategy = DDPStrategy(timeout=timedelta(seconds=60), process_group_backend="gloo")
    return {"strategy": strategy, "devices": 2}


def differing(folder: Path) -> dict[str, Any]:
    """What each rank is told of a rank that differs, of stock DDP in half precision, and of a hook that compresses."""
    found: dict[str, Any] = {}
    try:
        plan = plan_for("bf16-mixed")
        fit(CastOnOneRank(), callbacks=[PrecisionAudit(1, "raise", folder / "a")], plugins=[plan], **_ddp())
    except PlanError as error:
        found["one rank"] = str(error)
    stock = PrecisionAudit(run_dir=folder / "c")
    fit(Regression(), callbacks=[stock], precision="bf16-true", **_ddp())
    found["stock"] = [(row.reduce, row.ok) for row in stock.rows]
    compressed = PrecisionAudit(run_dir=folder / "d")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(Compressed(), callbacks=[compressed], precision="32-true", **_ddp())
    found["behind"] = [(row.reduce, row.ok) for row in compressed.rows]
    found["told"] = [str(warning.message) for warning in told if "PrecisionAudit" in str(warning.message)]
    return found


class Compressed(Regression):
    """It registers a compressing hook where nobody declared one."""

    def on_fit_start(self) -> None:
        self.trainer.model.register_comm_hook(None, fp16_compress_hook)
