"""The ``mp_*`` strategies against Lightning's own under the same dtypes, in two processes on gloo.

``python -m benchmarks.sharded [times counts] [--quick]``: step times, of sides that take turns; and what a step
dispatches, waits for and sends, which is the same on any machine, into docs/reference/counts.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import planner_pages
from benchmarks.harness import LanguageModel, StepTimes, device_name, fit, interleaved, plan, quietly, stock, tokens
from lightning_mp import make_strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import sharded_hosts  # Lightning's own strategies, let onto the CPU
from support.ranks import Ranks

MARKS = ("<!-- written by make bench -->", "<!-- end of what it writes -->")
TARGET = 1.05
TARGETS = {"fsdp2 param_dtype": 1.03}
BF16 = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
COUNTED = 4
Side = Callable[[str], tuple[dict[str, Any], LightningModule]]


class ShardedByHand(LanguageModel):
    """What Lightning asks of a user for FSDP2."""

    #: what all weights are gathered and computed with in
    param_dtype: torch.dtype | None = None

    def configure_model(self) -> None:
        """Shard every block, then the rest, summing gradients in fp32."""
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
        """The autocast it means, without the weight cache, as in Lightning's other plugins."""
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def _plugin(mode: str) -> dict[str, Any]:
    plugin = stock(mode)
    return {} if plugin is None else {"plugins": [plugin]}


def _ddp(mode: str) -> tuple[dict[str, Any], LightningModule]:
    return {"strategy": DDPStrategy(process_group_backend="gloo"), **_plugin(mode)}, LanguageModel()


def _fsdp2(mode: str) -> tuple[dict[str, Any], LightningModule]:
    return {"strategy": sharded_hosts.fsdp2(), **_plugin(mode)}, ShardedByHand()


def _param_dtype(mode: str) -> tuple[dict[str, Any], LightningModule]:
    return {"strategy": sharded_hosts.fsdp2()}, InHalf()


def _fsdp1(mode: str) -> tuple[dict[str, Any], LightningModule]:
    from torch.distributed.fsdp import MixedPrecision as Fsdp1MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    own = {} if mode == "32-true" else {"mixed_precision": Fsdp1MixedPrecision(reduce_dtype=torch.float32)}
    strategy = sharded_hosts.fsdp1(auto_wrap_policy=ModuleWrapPolicy({GPT2Block}), **own)
    plugins = [] if mode == "32-true" else [AutocastHere("bf16-mixed")]
    return {"strategy": strategy, "plugins": plugins}, LanguageModel()


def _zero(stage: int) -> Side:
    def side(mode: str) -> tuple[dict[str, Any], LightningModule]:
        own = {} if mode == "32-true" else {"torch_autocast": BF16}
        return {"strategy": sharded_hosts.deepspeed(stage, **own)}, LanguageModel()

    return side


ROWS: tuple[tuple[str, Side, tuple[str, ...]], ...] = (
    ("ddp", _ddp, ("32-true", "bf16-mixed", "16-mixed")),
    ("fsdp2", _fsdp2, ("32-true", "bf16-mixed", "16-mixed")),
    ("fsdp2 param_dtype", _param_dtype, ("bf16-mixed",)),
    # stock FSDP1 and DeepSpeed have no 16-mixed on the CPU that keeps fp32 weights
    ("fsdp1", _fsdp1, ("32-true", "bf16-mixed")),
    ("deepspeed_zero1", _zero(1), ("32-true", "bf16-mixed")),
    ("deepspeed_zero2", _zero(2), ("32-true", "bf16-mixed")),
    ("deepspeed_zero3", _zero(3), ("32-true", "bf16-mixed")),
)


def _train(row: int, mode: str, steps: int, callback: Callback, *, ours: bool) -> None:
    name, theirs, _ = ROWS[row]
    if ours:
        made = plan(mode)
        arguments, module = (
            {"plugins": [made], "strategy": make_strategy(name.partition(" ")[0], made)},
            LanguageModel(),
        )
    else:
        arguments, module = theirs(mode)
    clip = None if name == "fsdp1" else 1.0  # Lightning's FSDP1 cannot clip by norm
    two = {"accelerator": "cpu", "devices": 2, "gradient_clip_val": clip, "callbacks": [callback]}
    fit(module, tokens(), None, steps, **two, **arguments)


@dataclass(frozen=True)
class Timed:
    """Median seconds a step of stock and plan, in turn; run by every rank."""

    row: int
    mode: str
    rounds: int
    steps: int

    def run(self) -> dict[str, float]:
        """Train ``rounds`` times on each side."""
        quietly()
        return interleaved({name: partial(self._seconds, name == "plan") for name in ("stock", "plan")}, self.rounds)

    def _seconds(self, ours: bool) -> list[float]:
        times = StepTimes()
        _train(self.row, self.mode, self.steps, times, ours=ours)
        dist.barrier()
        return times.seconds


class Dispatched(TorchDispatchMode, Callback):
    """In the last batch: operators, reads of a tensor's value, collectives and the bytes they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"operators": 0, "syncs": 0, "collectives": 0, "bytes": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.counts["operators"] += 1
        self.counts["syncs"] += name.startswith("aten._local_scalar_dense")
        if name.startswith("c10d.") and "barrier" not in name:
            self.counts["collectives"] += 1
            self.counts["bytes"] += sum(x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == COUNTED - 1:
            self.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == COUNTED:
            self.__exit__(None, None, None)


@dataclass(frozen=True)
class Counted:
    """The counts of one side of one row; run by every rank."""

    row: int
    mode: str
    ours: bool

    def run(self) -> dict[str, int]:
        """Train a few steps and count in the last."""
        quietly()
        torch.manual_seed(0)
        counts = Dispatched()
        _train(self.row, self.mode, COUNTED, counts, ours=self.ours)
        return counts.counts


CELLS = [(row, mode) for row, (_, _, modes) in enumerate(ROWS) for mode in modes]


def times(ranks: Ranks, *, quick: bool) -> None:
    """Print a table of step times."""
    table = Table("strategy", "mode", "stock", "plan", "ratio", "target", title="A step, two processes on gloo")
    for row, mode in CELLS:
        name, found = ROWS[row][0], ranks.run(Timed(row, mode, *((2, 8) if quick else (6, 17))))[0]
        ratio = f"{found['plan'] / found['stock']:.3f}"
        sides = [f"{found[side] * 1e3:.1f} ms" for side in ("stock", "plan")]
        table.add_row(name, mode, *sides, ratio, f"<= {TARGETS.get(name, TARGET)}")
        print(f"{name} {mode}: {ratio}", flush=True)
    Console(width=120).print(table)
    print(f"{device_name()} a process; torch {torch.__version__}")


def counts(ranks: Ranks, *, quick: bool) -> None:
    """Write a table of counts into the page."""
    rows = []
    for row, mode in CELLS[:1] if quick else CELLS:
        theirs, ours = (ranks.run(Counted(row, mode, ours))[0] for ours in (False, True))
        cells = [f"{theirs[key]} → {ours[key]}" for key in ("operators", "syncs", "collectives")]
        cells.append(f"{theirs['bytes'] / 1e6:.1f} → {ours['bytes'] / 1e6:.1f}")
        rows.append([ROWS[row][0], f"`{mode}`", *cells])
        print(*rows[-1], flush=True)
    if not quick:
        heads = ["strategy", "mode", "operators", "device syncs", "collectives", "MB"]
        page = planner_pages.DOCS / "reference" / "counts.md"
        planner_pages.write_between(page, MARKS, planner_pages.table(heads, rows))


def main() -> None:
    """Measure and print."""
    parts = {"times": times, "counts": counts}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(parts), help=f"of {', '.join(parts)}")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean nothing")
    given = parser.parse_args()
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(".venv/torch_extensions").resolve()))
    with Ranks(seconds=600) as ranks:
        for part in given.parts:
            parts[part](ranks, quick=given.quick)


if __name__ == "__main__":
    main()
