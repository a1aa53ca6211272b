"""What a plan, the monitors and the strategies cost: step time and import time, against stock Lightning.

``python -m benchmarks.run [plan monitors strategies] [--quick]``: medians of sides that take turns, and their ratio.
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

from benchmarks import harness
from benchmarks.harness import MODES, interleaved, plan, stock
from benchmarks.sharded import the_strategies
from lightning_mp.callbacks import LossScaleMonitor, TrainingHealth

#: a model and its data, rounds and steps, and the target: one where arithmetic is everything, one where overhead shows
SHAPES = (
    ("compute-bound GPT-2", harness.LanguageModel, harness.tokens, (6, 17), 1.03),
    ("tiny MLP", harness.Tiny, harness.vectors, (10, 305), 1.05),
)
QUICK = (2, harness.WARM_UP + 4)
#: what, the mode, seconds of both sides, the target
Timed = tuple[str, str, float, float, str]


def seconds(model: Any, data: Any, plugin: Callable[[], Any], steps: int, watched: bool = False) -> list[float]:
    """Step times of one short fit, clipping by norm on; ``watched`` by both monitors, without a report at the end."""
    times = harness.StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        monitors = [TrainingHealth(folder, report=False), LossScaleMonitor()] if watched else []
        harness.fit(model(), data(), plugin(), steps, callbacks=[*monitors, times], gradient_clip_val=1.0)
    return times.seconds


def of_imports(code: str) -> list[float]:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
    return [time.perf_counter() - start]


def the_plan(*, quick: bool) -> Iterator[Timed]:
    for (name, *of, length, target), mode in product(SHAPES, MODES):
        rounds, steps = QUICK if quick else length
        sides = {one.__name__: partial(seconds, *of, partial(one, mode), steps) for one in (stock, plan)}
        found = interleaved(sides, rounds)
        yield f"step, {name}", mode, found["stock"], found["plan"], f"<= {target}"
    codes = ("import lightning.pytorch", "from lightning_mp import MixedPrecisionPlan")
    theirs, ours = interleaved({one: partial(of_imports, one) for one in codes}, 2 if quick else 9).values()
    yield codes[1], "", theirs, ours, "<= 1.10"


def the_monitors(*, quick: bool) -> Iterator[Timed]:
    """TrainingHealth in every step and LossScaleMonitor beside the same run without them."""
    for (name, *of, length, target), plugin, mode in product(SHAPES, (stock, plan), MODES):
        rounds, steps = QUICK if quick else length
        sides = {str(on): partial(seconds, *of, partial(plugin, mode), steps, on) for on in (False, True)}
        found = interleaved(sides, rounds)
        said = f"<= {target}" if length is SHAPES[0][-2] else ""
        yield name, f"{plugin.__name__}, {mode}", found["False"], found["True"], said


PARTS = {
    "plan": (the_plan, ("stock", "plan"), "A plan: medians of both in turn"),
    "monitors": (the_monitors, ("without", "with"), "Monitors: medians of both in turn"),
    "strategies": (the_strategies, ("stock", "plan"), "A step, two processes on gloo: medians of rank 0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean nothing")
    given = parser.parse_args()
    harness.quietly()
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
    print(f"{harness.device_name()}; {versions}")


if __name__ == "__main__":
    main()
