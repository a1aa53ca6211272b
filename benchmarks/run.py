"""What a plan and the monitors cost: step time, device syncs and import time, against stock Lightning.

``python -m benchmarks.run [plan monitors] [--quick]``: medians of sides that take turns, and their ratio.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode

from benchmarks.harness import (
    MODES,
    SHAPES,
    WARM_UP,
    Shape,
    StepTimes,
    Tiny,
    device_name,
    fit,
    interleaved,
    plan,
    quietly,
    stock,
    vectors,
)
from lightning_mp.callbacks import LossScaleMonitor, TrainingHealth

#: how a tensor's value comes to the host
_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
#: optimizers of the tiny net whose steps are counted
_STEPS = 20
OPTIMIZERS = {
    "fused AdamW": {"fused": True},
    "fused AdamW, OneCycleLR": {"fused": True, "scheduled": _STEPS + 1},
    "plain AdamW": {},
}


def seconds(shape: Shape, plugin: Callable[[], Any], steps: int, watched: bool = False) -> list[float]:
    """Step times of one short fit, clipping by norm on; ``watched`` by both monitors, without a report at the end."""
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        monitors = [TrainingHealth(folder, report=False), LossScaleMonitor()] if watched else []
        fit(shape.module(), shape.data(), plugin(), steps, callbacks=[*monitors, times], gradient_clip_val=1.0)
    return times.seconds


class Syncs(TorchFunctionMode, Callback):
    """Counts, in each warm batch, how often a tensor's value was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[-1] += getattr(func, "__name__", "") in _READS
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts.append(0)
        self.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.__exit__(None, None, None)


def syncs(plugin: Any, optimizer: dict[str, Any]) -> float:
    """Device syncs a warm step of the tiny net."""
    count = Syncs()
    fit(Tiny(**optimizer), vectors(), plugin, _STEPS, callbacks=[count], gradient_clip_val=1.0)
    return sum(count.counts[WARM_UP:]) / len(count.counts[WARM_UP:])


def same_as_stock(mode: str) -> bool:
    """Whether steps of plain AdamW with clipping leave the same bits in every weight."""
    weights: list[list[torch.Tensor]] = []
    for plugin in (stock, plan):
        torch.manual_seed(0)
        module = Tiny()
        fit(module, vectors(), plugin(mode), _STEPS, gradient_clip_val=1.0)
        weights.append([parameter.detach().cpu() for parameter in module.parameters()])
    return all(map(torch.equal, *weights))


def of_imports(code: str) -> list[float]:
    """Seconds of a fresh interpreter."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    return [time.perf_counter() - start]


def the_plan(*, quick: bool) -> list[Table]:
    """The plan beside stock Lightning."""
    timed = Table("what", "mode", "stock", "plan", "ratio", "target", title="A plan: medians of both in turn")
    for shape in SHAPES:
        rounds, steps = shape.length(quick=quick)
        for mode in MODES:
            sides = {one.__name__: partial(seconds, shape, partial(one, mode), steps) for one in (stock, plan)}
            found = interleaved(sides, rounds)
            _row(timed, f"step, {shape.name}", mode, found["stock"], found["plan"], f"<= {shape.target}")
    codes = ("import lightning.pytorch", "from lightning_mp import MixedPrecisionPlan")
    theirs, ours = interleaved({one: partial(of_imports, one) for one in codes}, 2 if quick else 9).values()
    _row(timed, codes[1], "", theirs, ours, "<= 1.10")
    counted = Table("what", *MODES, "target", title="Counted, clipping by norm on")
    for name, optimizer in OPTIMIZERS.items():
        own = syncs(None, optimizer)  # what a plain optimizer on the CPU reads of itself: its step counts
        row = [f"{syncs(plan(mode), optimizer) - own:g}" for mode in MODES]
        counted.add_row(f"device syncs a step by the plan, {name}", *row, "0" if name == "fused AdamW" else "<= 1")
    counted.add_row(
        "weights equal stock's, bit for bit", *("NO" if not same_as_stock(m) else "yes" for m in MODES), "yes"
    )
    return [timed, counted]


def the_monitors(*, quick: bool) -> list[Table]:
    """TrainingHealth in every step and LossScaleMonitor beside the same run without them."""
    timed = Table("shape", "mode", "without", "with", "ratio", "target", title="Monitors: medians of both in turn")
    for shape in SHAPES:
        rounds, steps = shape.length(quick=quick)
        for plugin in (stock, plan):
            for mode in MODES:
                sides = {str(on): partial(seconds, shape, partial(plugin, mode), steps, on) for on in (False, True)}
                found, target = interleaved(sides, rounds), "<= 1.03" if shape is SHAPES[0] else ""
                _row(timed, shape.name, f"{plugin.__name__}, {mode}", found["False"], found["True"], target)
    return [timed]


def _row(table: Table, what: str, mode: str, first: float, second: float, target: str) -> None:
    table.add_row(what, mode, f"{first * 1e3:.3f} ms", f"{second * 1e3:.3f} ms", f"{second / first:.3f}", target)
    print(f"{what} {mode}: {second / first:.3f}", flush=True)


PARTS = {"plan": the_plan, "monitors": the_monitors}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["plan", "monitors"], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean nothing")
    given = parser.parse_args()
    quietly()
    for part in given.parts:
        for table in PARTS[part](quick=given.quick):
            Console(width=120).print(table)
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    print(f"{device_name()}; {versions}")


if __name__ == "__main__":
    main()
