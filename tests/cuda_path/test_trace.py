"""``predict_memory`` on a machine with CUDA is a trace, as on one without, and gives the same numbers."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from benchmarks.memory import HELD, Cell, Trained
from cuda_path.machine import Machine, Processes
from lightning_mp import FP8, MixedPrecisionPlan, make_strategy
from lightning_mp.planner import MemoryPrediction, predict_memory
from lightning_mp.planner.predict import cublas_workspaces
from support.cells import WHOLE


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


#: kernels of attention keep other sums, CUDA's allocator gives out blocks of 512 bytes
WITHIN = 0.02
MIXED = "bf16-mixed"
SOME = (Traced(MIXED), Traced("16-true"), Traced("fp8-mixed", recipe="rowwise"), Traced(MIXED, "fsdp2", 8))
REST = (
    *(Traced(precision) for precision in ("32-true", "16-mixed", "bf16-true")),
    Traced(MIXED, "fsdp1", 8),
    Traced(MIXED, "hsdp", 8, options={"device_mesh": (2, 4)}),
)


def _name(case: Any) -> str:
    return " ".join(str(one) for one in (case.precision, case.recipe, case.strategy, case.ranks) if one)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SOME, *(pytest.param(case, marks=WHOLE) for case in REST)], ids=_name)
def test_it_is_the_trace_of_a_cpu(case: Traced, cuda: Processes) -> None:
    found = cuda.run(case, Machine(count=case.ranks))
    assert {one.method for one in found.values()} == {"traced"}, [one.notes for one in found.values()]
    assert found["cuda"].peak_bytes == pytest.approx(found["cpu"].peak_bytes, rel=WITHIN)
    for part in HELD:
        assert found["cuda"].held[part] == pytest.approx(found["cpu"].held[part], rel=WITHIN)


@pytest.mark.slow
def test_mxfp8_is_traced_where_its_casts_are_kernels_of_their_own(cuda: Processes) -> None:
    found = cuda.run(Traced("fp8-mixed", recipe="mxfp8"), Machine(capability=(10, 0), name="NVIDIA B200"))
    assert [one.method for one in found.values()] == ["traced"] * 2, [one.notes for one in found.values()]
    assert found["cuda"].peak_bytes == pytest.approx(found["cpu"].peak_bytes, rel=WITHIN)


@pytest.mark.slow
def test_offloaded_shards_take_no_memory_of_the_device(cuda: Processes) -> None:
    found = cuda.run(Traced(MIXED, "fsdp2", 8, options={"cpu_offload": True}), Machine(count=8))["cuda"]
    assert found.method == "traced", found.notes
    assert found.held["parameters"] == found.held["optimizer_state"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [8, pytest.param(64, marks=WHOLE)])
def test_a_llama_of_8b_is_traced_within_a_minute(ranks: int, cuda: Processes) -> None:
    found, seconds = cuda.run(Large(ranks), Machine(count=ranks))
    assert found.method == "traced", found.notes
    assert found.held["parameters"] == pytest.approx(4 * 8_030_261_248 / ranks, rel=WITHIN)
    assert seconds < 60  # of this process's own: a busy machine does not count
