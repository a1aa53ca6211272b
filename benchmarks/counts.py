"""Counts that hold on any machine, for docs/reference/counts.md: what a step dispatches, waits for, sends and holds.

``python -m benchmarks.counts [cuda]``: each mode under each strategy beside Lightning's own, two processes on gloo; and
on the CUDA device of nothing of ``tests/cuda_path``, of the first of several ranks.
"""

import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.plugins import HalfPrecision
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import MODES, LanguageModel, fit, plan, quietly, stock, tokens
from benchmarks.planner_pages import DOCS, table, write
from benchmarks.sharded import ROWS, _ours
from cuda_path.fits import Fit
from cuda_path.machine import Machine, Processes
from support.ranks import Ranks  # on the path since benchmarks.sharded

STEPS = 4
FITS = 3
COUNTS = ("operators", "syncs", "collectives")
PHASES = ("first step", "steady step", "save", "teardown")
ALONE = "one device"
#: strategy and its modes. Where DDP sums bf16 gradients in fp32, gloo's own thread frees the buffers: the profiler does
#: not see that. In 16-true AdamW's eps underflows: the weights are NaN under Lightning
CELLS = ((ALONE, (*MODES, "bf16-true")), *((name, modes) for name, _, modes in ROWS))


class Dispatched(TorchDispatchMode, Callback):
    """In the last batch: operators, reads of a tensor's value, collectives and the bytes they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = dict.fromkeys((*COUNTS, "bytes"), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.counts["operators"] += 1
        self.counts["syncs"] += name.startswith("aten._local_scalar_dense")
        if name.startswith("c10d.") and "barrier" not in name:
            self.counts["collectives"] += 1
            self.counts["bytes"] += sum(x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS - 1:
            self.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS:
            self.__exit__(None, None, None)


class Phases(Callback):
    """When each phase of a fit began and ended; it saves a checkpoint after the last step."""

    def __init__(self) -> None:
        self.spans: dict[str, list[int]] = {}

    def _mark(self, phase: str) -> None:
        self.spans.setdefault(phase, []).append(time.time_ns())

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self._mark({0: "first step", STEPS - 1: "steady step"}.get(trainer.global_step, "between"))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._mark({1: "first step", STEPS: "steady step"}.get(trainer.global_step, "between"))

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self._mark("save")
            trainer.save_checkpoint(trainer.strategy.broadcast(f"{folder}/saved.ckpt"))
            self._mark("save")
            trainer.strategy.barrier()
        self._mark("teardown")

    def peaks(self, measured: profile) -> dict[str, int]:
        """The most bytes held in each phase over what was held before the fit."""
        self._mark("teardown")
        events = measured.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
        moves = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        held = [(0, 0), *zip((at for at, _ in moves), accumulate(size for _, size in moves), strict=True)]
        return {phase: _peak(held, *self.spans[phase]) for phase in PHASES}


def _peak(held: list[tuple[int, int]], begin: int, end: int) -> int:
    """The most held from ``begin`` to ``end``, what was held before included."""
    before = [size for at, size in held if at < begin]
    return max([before[-1], *(size for at, size in held if begin <= at <= end)])


def counted(strategy: str, mode: str, ours: bool) -> dict[str, int]:
    """Train a few steps: what the last one dispatches, and what each phase holds at most, the median of some fits.

    Run by every rank. gloo's threads free at no fixed moment: what the fit before held may be counted as a fall.
    """
    quietly()
    counts, peaks = Dispatched(), list[dict[str, int]]()
    _fit(strategy, mode, ours, counts)
    for phases in (Phases() for _ in range(FITS)):
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            _fit(strategy, mode, ours, phases)
        peaks.append(phases.peaks(measured))
    return counts.counts | {phase: sorted(one[phase] for one in peaks)[FITS // 2] for phase in PHASES}


def _fit(strategy: str, mode: str, ours: bool, callback: Callback) -> None:
    torch.manual_seed(0)
    clip = None if strategy == "fsdp1" else 1.0  # Lightning's FSDP1 cannot clip by norm
    given: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "gradient_clip_val": clip, "callbacks": [callback]}
    module: LightningModule = LanguageModel()
    if strategy == ALONE:
        plugin: Any = plan if ours else HalfPrecision if mode == "bf16-true" else stock
        given |= {"devices": 1, "plugin": plugin(mode)}
    else:
        side = partial(_ours, strategy) if ours else next(side for name, side, _ in ROWS if name == strategy)
        arguments, module = side(mode)
        given |= arguments
    fit(module, tokens(), given.pop("plugin", None), STEPS, **given)


def _rows() -> Iterator[list[str]]:
    with Ranks(seconds=300) as ranks:
        for name, mode in ((name, mode) for name, modes in CELLS for mode in modes):
            alone = name == ALONE
            sides = ((name, mode, ours) for ours in (False, True))
            stock, ours = (counted(*side) if alone else ranks.call(counted, *side)[0] for side in sides)
            cells = [f"{stock[key]} → {ours[key]}" for key in COUNTS]
            cells += [f"{stock[key] / 1e6:.0f} → {ours[key] / 1e6:.0f}" for key in ("bytes", *PHASES)]
            print(name, mode, *cells, sep=" | ", flush=True)
            yield [name.removeprefix("deepspeed_").removeprefix("fsdp2 "), f"`{mode}`", *cells]


#: on CUDA: strategy and ranks
CUDA = {
    ALONE: Fit(),
    "fsdp2, 8 ranks": Fit(strategy="fsdp2", ranks=8, options={"wrap": "Block"}),
    "hsdp, 64 ranks": Fit(strategy="hsdp", ranks=64, options={"wrap": "Block", "device_mesh": (8, 8)}),
    "fsdp1, 8 ranks": Fit(strategy="fsdp1", ranks=8),
}
#: the lines of the page before the two tables
CPU_BELOW, CUDA_BELOW = "# Counts", "## On CUDA"


def _cuda_rows() -> Iterator[list[str]]:
    processes = Processes()
    try:
        for (name, host), mode in product(CUDA.items(), (*MODES, "bf16-true")):
            fit = replace(host, precision=mode)
            sides = [replace(fit, stock=True), fit] if name == ALONE else [fit]
            found = [processes.run(side, Machine(count=host.ranks)) for side in sides]
            operators = " → ".join(str(sum(one.operators.values())) for one in found)
            ours = sum(count for where, count in found[-1].waits.items() if " lightning_mp/" in where)
            yield [name, f"`{mode}`", operators, str(ours), str(sum(found[-1].waits.values()) - ours)]
    finally:
        processes.stop()


if __name__ == "__main__":
    PAGE = DOCS / "reference" / "counts.md"
    write(PAGE, CUDA_BELOW, table(("strategy", "mode", "operators", "waits", "hosts' own"), _cuda_rows()))
    if sys.argv[1:] != ["cuda"]:
        HEADS = ("strategy", "mode", "operators", "device syncs", "collectives", "sent", *PHASES)
        write(PAGE, CPU_BELOW, table(HEADS, _rows()))
