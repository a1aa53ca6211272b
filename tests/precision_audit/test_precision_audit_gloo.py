"""PrecisionAudit on two processes: what is reduced, what one rank alone does, and no false alarm on any strategy."""

import json
import warnings
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_mp.precision_audit.audit import PrecisionAudit, audit
from support.language import Language, llama, tokens
from support.models import Regression
from support.oracles import plan_for
from support.ranks import Ranks
from support.running import fit, trainer
from support.sharded import ddp, refused, under

pytestmark = pytest.mark.gloo


@dataclass(frozen=True)
class Audited:
    strategy: str
    mode: str
    folder: Path
    pins: dict[str, str] = field(default_factory=dict)
    checkpointing: str | None = None

    def run(self) -> dict[str, Any]:
        callback = PrecisionAudit(steps=2, on_mismatch="raise", run_dir=self.folder)
        plan = plan_for(self.mode, pins=self.pins, checkpointing=self.checkpointing)
        runner = trainer(callbacks=[callback], max_steps=2, **under(self.strategy, plan))
        runner.fit(Language(llama()), tokens())
        assert callback.report is not None
        later = audit(runner)
        return {
            "rows": {row.module: row.to_dict() for row in callback.rows},
            "text": str(callback.report),
            "later": later.ok or str(later),
        }


class CastOnOneRank(Regression):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        hidden = self.net[:3](x)
        with torch.autocast("cpu", enabled=self.global_rank == 0, dtype=torch.bfloat16):
            return (self.net[3](hidden.float()).float() - y).pow(2).mean()


class Compressed(Regression):
    def on_fit_start(self) -> None:
        self.trainer.model.register_comm_hook(None, fp16_compress_hook)


def differing(folder: Path) -> dict[str, Any]:
    """What each rank is told of a rank that differs, of stock DDP in half precision, and of a hook that compresses."""
    callback, plan = PrecisionAudit(1, "raise", folder / "a"), plan_for("bf16-mixed")
    found: dict[str, Any] = {
        "one rank": refused(lambda: fit(CastOnOneRank(), callbacks=[callback], plugins=[plan], **ddp()))
    }
    stock = PrecisionAudit(run_dir=folder / "c")
    fit(Regression(), callbacks=[stock], precision="bf16-true", **ddp())
    found["stock"] = [(row.reduce, row.ok) for row in stock.rows]
    compressed = PrecisionAudit(run_dir=folder / "d")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(Compressed(), callbacks=[compressed], precision="32-true", **ddp())
    found["behind"] = [(row.reduce, row.ok) for row in compressed.rows]
    found["told"] = [str(warning.message) for warning in told if "PrecisionAudit" in str(warning.message)]
    return found


NORMS = {"*norm*": "fp32"}
BLOCKS = {"checkpointing": "LlamaDecoderLayer"}
CASES = {
    "ddp": partial(Audited, "ddp", "bf16-true", pins=NORMS),
    "fsdp2": partial(Audited, "fsdp2", "bf16-mixed", pins={**NORMS, "lm_head": "bf16"}, **BLOCKS),
    "fsdp1": partial(Audited, "fsdp1", "16-mixed"),
    "zero1": partial(Audited, "deepspeed_zero1", "bf16-true", pins=NORMS),
    "zero2": partial(Audited, "deepspeed_zero2", "16-mixed"),
    "zero3": partial(Audited, "deepspeed_zero3", "bf16-mixed", pins=NORMS),
}


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_is_as_declared(ranks: Ranks, tmp_path: Path, case: str) -> None:
    audited = CASES[case](tmp_path)
    found, other = ranks.run(audited)
    assert found["rows"] == other["rows"]  # both tell what all saw
    assert json.loads((tmp_path / "audit.json").read_text())["rows"] == list(found["rows"].values())
    policy = plan_for(audited.mode).policy
    assert found["later"] is True
    assert len(found["rows"]) == 21, found["text"]
    for name, row in found["rows"].items():
        pin = next((dtype for pattern, dtype in audited.pins.items() if pattern.strip("*") in name), None)
        stored = pin or policy.storage_dtype
        wanted = {"param": stored, "grad": stored, "reduce": "fp32", "optimizer_state": stored, "ok": True}
        assert {key: row[key] for key in wanted} == wanted, (name, found["text"])
        assert row["declared"] == (pin or policy.compute_dtype), name
        if "proj" in name:
            assert row["compute"] == policy.compute_dtype, (name, found["text"])


def test_what_is_summed_and_what_one_rank_alone_does(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.call(differing, tmp_path)
    for found in (first, second):
        assert "net.3 computed in fp32 on rank 1. Allowed: bf16" in found["one rank"]
        assert found["stock"] == [("bf16", True)] * 3  # stock DDP sums what it finds
        assert found["behind"] == [("fp16", False)] * 3
    assert "net.0, net.1, net.3 (3 modules) with gradients summed across ranks in fp16" in first["told"][0]
    assert second["told"] == []  # one process speaks
