"""PrecisionAudit on two processes: what is reduced, what one rank alone does, and no false alarm on any strategy."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from support.audit_ranks import Audited, Differing
from support.oracles import plan_for
from support.ranks import Ranks

pytestmark = pytest.mark.gloo

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
    first, second = ranks.run(Differing(tmp_path))
    for found in (first, second):
        assert "net.3 computed in fp32 on rank 1. Allowed: bf16" in found["one rank"]
        assert found["stock"] == [("bf16", True)] * 3  # stock DDP sums what it finds
        assert found["behind"] == [("fp16", False)] * 3
    assert "net.0, net.1, net.3 (3 modules) with gradients summed across ranks in fp16" in first["told"][0]
    assert second["told"] == []  # one process speaks
