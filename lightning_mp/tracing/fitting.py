"""What fits a device: the largest micro-batch, and what each way of checkpointing buys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_mp.compat.torch_fake import leaves, mapped
from lightning_mp.compat.transformers import block_classes
from lightning_mp.planner.memory import MemoryPrediction
from lightning_mp.policy import Checkpointing
from lightning_mp.precision import MixedPrecisionPlan
from lightning_mp.tracing.predict import predict_memory

#: more are not tried
MOST_ROWS = 4096
_TRIES = 8
Mode = Literal["none", "selective", "full"]
StrategyFor = Callable[[MixedPrecisionPlan], Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """One way of checkpointing: the prediction for the batch at hand, and how many rows of it fit; 0: none do."""

    checkpointing: Mode
    prediction: MemoryPrediction
    rows: int


def rows_of(batch: Any) -> int:
    """How many rows ``batch`` has: the size of its first tensor."""
    return next((len(leaf) for leaf in leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def with_rows(batch: Any, rows: int) -> Any:
    """``batch`` with so many rows, its own again and again."""
    given = rows_of(batch)
    chosen = torch.arange(rows) % given
    return mapped(
        lambda leaf: leaf[chosen] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == given else leaf, batch
    )


def fits(
    module: nn.Module,
    batch: Any,
    plan: MixedPrecisionPlan,
    memory: float,
    strategy: StrategyFor = lambda _: "auto",
    **run: Any,
) -> Iterator[Fit]:
    """Each way of checkpointing, the one that recomputes least first, on a device of ``memory`` bytes.

    Other ways than the plan's own are for its modules, or else for the blocks that a transformers model names.
    ``strategy`` makes the strategy for a plan; ``run`` goes to ``predict_memory``.
    """
    own = plan.policy.checkpointing
    patterns = _blocks(module) if own is None else own.modules
    modes: tuple[Mode, ...] = ("none", "selective", "full") if patterns else ("none",)
    for mode in modes:
        recomputed = None if mode == "none" else Checkpointing(modules=patterns, mode=mode)
        there = MixedPrecisionPlan.from_policy(replace(plan.policy, checkpointing=recomputed))

        def predict(rows: int, there: MixedPrecisionPlan = there) -> MemoryPrediction:
            return predict_memory(module, with_rows(batch, rows), there, strategy=strategy(there), **run)

        found = predict(rows_of(batch))
        yield Fit(mode, found, most_rows(lambda rows: predict(rows).peak_bytes, memory, rows_of(batch), found))


def _blocks(module: nn.Module) -> tuple[str, ...]:
    named = {name for inner in module.modules() for name in block_classes(inner)}
    return tuple(sorted(named & {type(inner).__name__ for inner in module.modules()}))


def most_rows(peak: Callable[[int], int], memory: float, rows: int, known: MemoryPrediction) -> int:
    """The most rows whose ``peak`` is not above ``memory``, guessed on a line and tried."""
    sizes = {rows: known.peak_bytes}

    def size(count: int) -> int:
        if count not in sizes:
            sizes[count] = peak(count)
        return sizes[count]

    low, high = 0, MOST_ROWS + 1  # so many fit, so many do not
    guess = rows
    for _ in range(_TRIES):
        if size(guess) <= memory:
            low = max(low, guess)
        else:
            high = min(high, guess)
        if high - low <= 1:
            break
        one, other = sorted(sizes)[-2:] if len(sizes) > 1 else (guess, guess)
        slope = (sizes[other] - sizes[one]) / (other - one) if other > one else 0
        line = int(guess + (memory - sizes[guess]) / slope) if slope > 0 else 2 * guess
        guess = min(max(line, low + 1), high - 1)
    return low
