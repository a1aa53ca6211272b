"""PrecisionAudit on two processes: what is reduced, what one rank alone does, and no false alarm on any strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import audit_ranks
from support.gloo import run_ranks
from support.oracles import plan_for

pytestmark = pytest.mark.gloo

PLAIN: list[audit_ranks.Run] = [
    ("ddp", "bf16-true", {"*norm*": "fp32"}, None),
    ("fsdp2", "bf16-mixed", {"*norm*": "fp32", "lm_head": "bf16"}, "LlamaDecoderLayer"),
    ("fsdp1", "16-mixed", {"*norm*": "fp32"}, None),
]
ZERO: list[audit_ranks.Run] = [
    ("deepspeed_zero1", "bf16-true", {"*norm*": "fp32"}, None),
    ("deepspeed_zero2", "16-mixed", None, None),
    ("deepspeed_zero3", "bf16-mixed", {"*norm*": "fp32"}, None),
]


@pytest.mark.parametrize("runs", [PLAIN, ZERO], ids=["torch", "zero"])
def test_every_strategy_is_as_declared(tmp_path: Path, runs: list[audit_ranks.Run]) -> None:
    first, second = run_ranks(audit_ranks.trained, tmp_path, runs, timeout=250)
    for place, (strategy, mode, pins, _) in enumerate(runs):
        found = first[place]
        assert found["rows"] == second[place]["rows"]  # both tell what all saw
        _check(strategy, mode, pins or {}, found)
        assert json.loads((tmp_path / str(place) / "audit.json").read_text())["rows"] == list(found["rows"].values())


def _check(strategy: str, mode: str, pins: dict[str, str], found: dict[str, Any]) -> None:
    policy = plan_for(mode).policy
    assert found["later"] is True, strategy
    assert len(found["rows"]) == 21, found["text"]
    for name, row in found["rows"].items():
        pin = next((dtype for pattern, dtype in pins.items() if pattern.strip("*") in name), None)
        stored = pin or policy.storage_dtype
        wanted = {"param": stored, "grad": stored, "reduce": "fp32", "optimizer_state": stored, "ok": True}
        assert {key: row[key] for key in wanted} == wanted, (strategy, name, found["text"])
        assert row["declared"] == (pin or policy.compute_dtype), (strategy, name)
        if "proj" in name:
            assert row["compute"] == policy.compute_dtype, (strategy, name, found["text"])


def test_what_is_summed_and_what_one_rank_alone_does(tmp_path: Path) -> None:
    first, second = run_ranks(audit_ranks.differing, tmp_path)
    for found in (first, second):
        assert "net.3: computed in fp32 on rank 1; allowed: bf16" in found["one rank"]
        assert found["stock"] == [("bf16", True)] * 3  # stock DDP sums what it finds
        assert found["behind"] == [("fp16", False)] * 3
    assert "net.0, net.1, net.3 (3 modules) with gradients summed across ranks in fp16" in first["told"][0]
    assert second["told"] == []  # one process speaks
