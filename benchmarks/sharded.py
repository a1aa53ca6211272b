"""Step time of the ``mp_*`` strategies against Lightning's own under the same dtypes, in two processes.

Both sides take turns in the same two processes; printed are medians and their ratio, of rank 0.
``python -m benchmarks.sharded [--quick]``
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    MODES,
    LanguageModel,
    StepTimes,
    device_name,
    fit,
    interleaved,
    plan,
    quietly,
    stock,
    tokens,
)
from lightning_mp import make_strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import sharded_hosts  # Lightning's own strategies, let onto the CPU
from support.ranks import run_ranks

TARGET = 1.05
TARGETS = {"fsdp2 param_dtype": 1.03}
BF16 = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
Side = Callable[[str], tuple[dict[str, Any], LightningModule]]


class ShardedByHand(LanguageModel):
    """What Lightning asks of a user for FSDP2."""

    #: what all weights are gathered and computed with in
    param_dtype: torch.dtype | None = None

    def configure_model(self) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if isinstance(self.model, FSDPModule):
            return
        options: dict[str, Any] = {
            "mesh": self.device_mesh["data_parallel"],
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=torch.float32),
        }
        for block in self.model.transformer.h:
            fully_shard(block, **options)
        fully_shard(self.model, **options)


class InHalf(ShardedByHand):
    """By FSDP2's own mixed precision, without autocast: norms and losses run in half precision too."""

    param_dtype = torch.bfloat16


class AutocastHere(FSDPPrecision):
    """Lightning's plugin, which turns autocast on for CUDA whatever the device: on a CPU it would compute in fp32."""

    def forward_context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def _beside(mode: str, strategy: Any) -> dict[str, Any]:
    return {"strategy": strategy, "plugin": stock(mode)}


def _fsdp1(mode: str) -> tuple[dict[str, Any], LightningModule]:
    from torch.distributed.fsdp import MixedPrecision as Fsdp1MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    own = {} if mode == "32-true" else {"mixed_precision": Fsdp1MixedPrecision(reduce_dtype=torch.float32)}
    strategy = sharded_hosts.fsdp1(auto_wrap_policy=ModuleWrapPolicy({GPT2Block}), **own)
    plugin = None if mode == "32-true" else AutocastHere("bf16-mixed")
    return {"strategy": strategy, "plugin": plugin}, LanguageModel()


def _zero(mode: str, stage: int) -> tuple[dict[str, Any], LightningModule]:
    own = {} if mode == "32-true" else {"torch_autocast": BF16}
    return {"strategy": sharded_hosts.deepspeed(stage, **own)}, LanguageModel()


ROWS: tuple[tuple[str, Side, tuple[str, ...]], ...] = (
    ("ddp", lambda mode: (_beside(mode, DDPStrategy(process_group_backend="gloo")), LanguageModel()), MODES),
    ("fsdp2", lambda mode: (_beside(mode, sharded_hosts.fsdp2()), ShardedByHand()), MODES),
    ("fsdp2 param_dtype", lambda _: ({"strategy": sharded_hosts.fsdp2()}, InHalf()), ("bf16-mixed",)),
    # stock FSDP1 and DeepSpeed have no 16-mixed on the CPU that keeps fp32 weights
    ("fsdp1", _fsdp1, MODES[:2]),
    *((f"deepspeed_zero{stage}", partial(_zero, stage=stage), MODES[:2]) for stage in (1, 2, 3)),
)


def _ours(name: str, mode: str) -> tuple[dict[str, Any], LightningModule]:
    made = plan(mode)
    return {"plugin": made, "strategy": make_strategy(name.partition(" ")[0], made)}, LanguageModel()


@dataclass(frozen=True)
class Steps:
    """Median seconds a step of stock and plan, in turn; run by every rank."""

    row: int
    mode: str
    rounds: int
    steps: int

    def run(self) -> dict[str, float]:
        quietly()
        name, theirs, _ = ROWS[self.row]
        sides = {"stock": lambda: theirs(self.mode), "plan": lambda: _ours(name, self.mode)}
        return interleaved({side: partial(self._seconds, build) for side, build in sides.items()}, self.rounds)

    def _seconds(self, build: Callable[[], Any]) -> list[float]:
        arguments, module = build()
        # Lightning's FSDP1 cannot clip by norm
        clip = None if ROWS[self.row][0] == "fsdp1" else 1.0
        times = StepTimes()
        two = {"accelerator": "cpu", "devices": 2, "gradient_clip_val": clip, "callbacks": [times]}
        fit(module, tokens(), arguments.pop("plugin", None), self.steps, **two, **arguments)
        dist.barrier()
        return times.seconds


def main() -> None:
    rounds, steps = (2, 8) if "--quick" in sys.argv else (6, 17)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(".venv/torch_extensions").resolve()))
    table = Table("strategy", "mode", "stock", "plan", "ratio", "target", title="A step, two processes on gloo")
    for row, (name, _, modes) in enumerate(ROWS):
        for mode in modes:
            found = run_ranks(Steps(row, mode, rounds, steps), seconds=600)[0]
            ratio, times = f"{found['plan'] / found['stock']:.3f}", [f"{one * 1e3:.1f} ms" for one in found.values()]
            table.add_row(name, mode, *times, ratio, f"<= {TARGETS.get(name, TARGET)}")
            print(f"{name} {mode}: {ratio}", flush=True)
    Console(width=120).print(table)
    print(f"{device_name()} a process; torch {torch.__version__}")


if __name__ == "__main__":
    main()
