"""What a plan and the monitors cost: step time and import time, against stock Lightning.

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
from rich.console import Console
from rich.table import Table

from benchmarks.harness import (
    MODES,
    SHAPES,
    Shape,
    StepTimes,
    device_name,
    fit,
    interleaved,
    plan,
    quietly,
    stock,
)
from lightning_mp.callbacks import LossScaleMonitor, TrainingHealth


def seconds(shape: Shape, plugin: Callable[[], Any], steps: int, watched: bool = False) -> list[float]:
    """Step times of one short fit, clipping by norm on; ``watched`` by both monitors, without a report at the end."""
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        monitors = [TrainingHealth(folder, report=False), LossScaleMonitor()] if watched else []
        fit(shape.module(), shape.data(), plugin(), steps, callbacks=[*monitors, times], gradient_clip_val=1.0)
    return times.seconds


def of_imports(code: str) -> list[float]:
    """Seconds of a fresh interpreter."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    return [time.perf_counter() - start]


def the_plan(*, quick: bool) -> Table:
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
    return timed


def the_monitors(*, quick: bool) -> Table:
    """TrainingHealth in every step and LossScaleMonitor beside the same run without them."""
    timed = Table("shape", "mode", "without", "with", "ratio", "target", title="Monitors: medians of both in turn")
    for shape in SHAPES:
        rounds, steps = shape.length(quick=quick)
        for plugin in (stock, plan):
            for mode in MODES:
                sides = {str(on): partial(seconds, shape, partial(plugin, mode), steps, on) for on in (False, True)}
                found, target = interleaved(sides, rounds), "<= 1.03" if shape is SHAPES[0] else ""
                _row(timed, shape.name, f"{plugin.__name__}, {mode}", found["False"], found["True"], target)
    return timed


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
        Console(width=120).print(PARTS[part](quick=given.quick))
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    print(f"{device_name()}; {versions}")


if __name__ == "__main__":
    main()
