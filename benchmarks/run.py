"""What a plan and the monitors cost: step time and import time, against stock Lightning.

``python -m benchmarks.run [plan monitors] [--quick]``: medians of sides that take turns, and their ratio.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import lightning
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.harness import MODES, SHAPES, Shape, StepTimes, device_name, fit, interleaved, plan, quietly, stock
from lightning_mp.callbacks import LossScaleMonitor, TrainingHealth

#: what, the mode, seconds of both sides, the target
Timed = tuple[str, str, float, float, str]


def seconds(shape: Shape, plugin: Callable[[], Any], steps: int, watched: bool = False) -> list[float]:
    """Step times of one short fit, clipping by norm on; ``watched`` by both monitors, without a report at the end."""
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        monitors = [TrainingHealth(folder, report=False), LossScaleMonitor()] if watched else []
        fit(shape.module(), shape.data(), plugin(), steps, callbacks=[*monitors, times], gradient_clip_val=1.0)
    return times.seconds


def of_imports(code: str) -> list[float]:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    return [time.perf_counter() - start]


def the_plan(*, quick: bool) -> Iterator[Timed]:
    for shape in SHAPES:
        rounds, steps = shape.length(quick=quick)
        for mode in MODES:
            sides = {one.__name__: partial(seconds, shape, partial(one, mode), steps) for one in (stock, plan)}
            found = interleaved(sides, rounds)
            yield f"step, {shape.name}", mode, found["stock"], found["plan"], f"<= {shape.target}"
    codes = ("import lightning.pytorch", "from lightning_mp import MixedPrecisionPlan")
    theirs, ours = interleaved({one: partial(of_imports, one) for one in codes}, 2 if quick else 9).values()
    yield codes[1], "", theirs, ours, "<= 1.10"


def the_monitors(*, quick: bool) -> Iterator[Timed]:
    """TrainingHealth in every step and LossScaleMonitor beside the same run without them."""
    for shape, plugin, mode in product(SHAPES, (stock, plan), MODES):
        rounds, steps = shape.length(quick=quick)
        sides = {str(on): partial(seconds, shape, partial(plugin, mode), steps, on) for on in (False, True)}
        found, target = interleaved(sides, rounds), "<= 1.03" if shape is SHAPES[0] else ""
        yield shape.name, f"{plugin.__name__}, {mode}", found["False"], found["True"], target


PARTS = {
    "plan": (the_plan, ("stock", "plan"), "A plan: medians of both in turn"),
    "monitors": (the_monitors, ("without", "with"), "Monitors: medians of both in turn"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["plan", "monitors"], help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean nothing")
    given = parser.parse_args()
    quietly()
    for part in given.parts:
        rows, sides, title = PARTS[part]
        table = Table("what", "mode", *sides, "ratio", "target", title=title)
        for what, mode, first, second, target in rows(quick=given.quick):
            table.add_row(
                what, mode, f"{first * 1e3:.3f} ms", f"{second * 1e3:.3f} ms", f"{second / first:.3f}", target
            )
            print(f"{what} {mode}: {second / first:.3f}", flush=True)
        Console(width=120).print(table)
    versions = f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    print(f"{device_name()}; {versions}")


if __name__ == "__main__":
    main()
