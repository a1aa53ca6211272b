"""``predict_memory`` on a CUDA machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.memory import Cell, Trained
from lightning_mp import FP8, MixedPrecisionPlan, make_strategy
from lightning_mp.planner import MemoryPrediction, predict_memory
from lightning_mp.planner.predict import cublas_workspaces


def _predicted(module: Any, batch: Any, plan: MixedPrecisionPlan, case: Any, accelerator: str) -> MemoryPrediction:
    strategy: Any = case.strategy
    if strategy != "auto":
        strategy = make_strategy(strategy, plan, **case.options)
    args = {"accelerator": accelerator}
    found = predict_memory(module, batch, plan, strategy=strategy, devices=case.ranks, trainer_args=args)
    # beside these models cuBLAS takes much, and nothing on a CPU
    return replace(found, peak_bytes=found.peak_bytes - (cublas_workspaces() if accelerator == "cuda" else 0))


@dataclass(frozen=True)
class Traced:
    precision: str
    strategy: str = "auto"
    ranks: int = 1
    recipe: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> dict[str, MemoryPrediction]:
        cell = Cell("llama", self.precision, "none", "AdamW", kv_heads=2)
        rule = None if self.recipe is None else FP8(recipe=self.recipe, small="convert")
        plan = MixedPrecisionPlan(self.precision, fp8=rule)
        return {device: _predicted(cell.module(), cell.batch(), plan, self, device) for device in ("cuda", "cpu")}


@dataclass(frozen=True)
class Large:
    """A Llama of 8B on the meta device: the prediction, and the seconds that it took."""

    ranks: int
    strategy: str = "fsdp2"
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> tuple[MemoryPrediction, float]:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256}
        with torch.device("meta"):
            module = Trained(LlamaForCausalLM(LlamaConfig(**sizes)).train(), "AdamW")
        begin = time.process_time()
        batch, plan = torch.zeros(1, 2048, dtype=torch.int64), MixedPrecisionPlan("bf16-mixed")
        return _predicted(module, batch, plan, self, "cuda"), time.process_time() - begin
