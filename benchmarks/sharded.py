"""A step of the ``mp_*`` strategies and one of Lightning's own under the same dtypes, in turn in two processes."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import FSDPPrecision
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.harness import MODES, LanguageModel, StepTimes, fit, interleaved, plan, quietly, stock, tokens
from lightning_mp import make_strategy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support import sharded_hosts  # Lightning's own strategies, let onto the CPU
from support.ranks import Call, run_ranks

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


def _seconds(name: str, side: Callable[[], tuple[dict[str, Any], LightningModule]], steps: int) -> list[float]:
    arguments, module = side()
    clip = None if name == "fsdp1" else 1.0  # Lightning's FSDP1 cannot clip by norm
    times = StepTimes()
    two = {"accelerator": "cpu", "devices": 2, "gradient_clip_val": clip, "callbacks": [times]}
    fit(module, tokens(), arguments.pop("plugin", None), steps, **two, **arguments)
    dist.barrier()
    return times.seconds


def of_ranks(row: int, mode: str, rounds: int, steps: int) -> dict[str, float]:
    """Median seconds a step of stock and plan, in turn; run by every rank."""
    quietly()
    name, theirs, _ = ROWS[row]
    sides = {"stock": partial(theirs, mode), "plan": partial(_ours, name, mode)}
    return interleaved({one: partial(_seconds, name, side, steps) for one, side in sides.items()}, rounds)


def the_strategies(*, quick: bool) -> Iterator[tuple[str, str, float, float, str]]:
    rounds, steps = (2, 8) if quick else (6, 17)
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(".venv/torch_extensions").resolve()))
    for row, (name, _, modes) in enumerate(ROWS):
        for mode in modes:
            found = run_ranks(Call(of_ranks, (row, mode, rounds, steps)), seconds=600)[0]
            yield name, mode, found["stock"], found["plan"], f"<= {TARGETS.get(name, 1.05)}"
