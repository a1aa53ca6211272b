"""The figures of the README: step time against stock Lightning, host reads, import time.

Both sides of every ratio are interleaved in this one process (or, for imports, in alternating processes); what is
printed are medians and their ratio. ``python -m benchmarks.run [--quick]``
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.plugins.precision import Precision
from rich.console import Console
from rich.table import Table

from benchmarks.exact import READS, same_as_stock
from benchmarks.fit import fit
from benchmarks.shapes import SHAPES, Shape
from lightning_mp import LossScaling, MixedPrecisionPlan

WARM_UP = 5
MODES = ("32-true", "bf16-mixed", "16-mixed")
TARGETS = {"compute-bound GPT-2": 1.03, "tiny MLP": 1.05}


class StepTimes(Callback):
    """Wall-clock seconds from the end of one batch to the end of the next, the loop around the step included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Note the time since the last call."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._last is not None and trainer.global_step > WARM_UP:
            self.seconds.append(now - self._last)
        self._last = now


def stock(mode: str) -> Precision | None:
    """Lightning's own plugin for ``mode``; it has no fp16 on the CPU by name, but the plugin itself works there."""
    if mode == "32-true":
        return None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8) if mode == "16-mixed" else None
    return MixedPrecision(mode, device, scaler)  # pyright: ignore[reportArgumentType]


def quiet_plan(mode: str) -> MixedPrecisionPlan:
    """The plan with a scale at which no step is skipped: only there can weights be compared."""
    scaled = mode == "16-mixed"
    return MixedPrecisionPlan(mode, loss_scaling=LossScaling.torch(init_scale=2.0**8) if scaled else None)


def run(shape: Shape, plugin: Precision | None, module: LightningModule, steps: int) -> list[float]:
    """Step times of one short fit."""
    times = StepTimes()
    fit(module, shape.data(), plugin, steps, callbacks=[times], gradient_clip_val=1.0)
    return times.seconds


def compare(shape: Shape, mode: str, rounds: int, steps: int) -> tuple[float, float]:
    """Median seconds a step: (stock, plan), the two in turn, with the order swapped every round."""
    sides: dict[str, tuple[Callable[[], Precision | None], list[float]]] = {
        "stock": (lambda: stock(mode), []),
        "plan": (lambda: quiet_plan(mode), []),
    }
    for number in range(rounds):
        for name in sorted(sides, reverse=bool(number % 2)):
            plugin, seconds = sides[name]
            torch.manual_seed(0)
            seconds += run(shape, plugin(), shape.module(), steps)
    return statistics.median(sides["stock"][1]), statistics.median(sides["plan"][1])


def import_ratio(statement: str, rounds: int) -> tuple[float, float]:
    """Median seconds of a fresh interpreter: (``import lightning.pytorch``, ``statement``)."""
    seconds: dict[str, list[float]] = {"import lightning.pytorch": [], statement: []}
    for _ in range(rounds):
        for code, times in seconds.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
            times.append(time.perf_counter() - start)
    base, ours = seconds.values()
    return statistics.median(base), statistics.median(ours)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean nothing")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    import logging

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    table = Table("what", "mode", "stock", "plan", "ratio", "asked for", title="Medians, both sides interleaved")
    for shape in SHAPES:
        rounds, steps = (2, WARM_UP + 4) if quick else (shape.rounds, shape.steps)
        for mode in MODES:
            ours, theirs = compare(shape, mode, rounds, steps)[::-1]
            ratio = f"{ours / theirs:.3f}"
            asked = f"<= {TARGETS[shape.name]}"
            table.add_row(f"step, {shape.name}", mode, f"{theirs * 1e3:.3f} ms", f"{ours * 1e3:.3f} ms", ratio, asked)
    for statement in ("import lightning_mp", "from lightning_mp import MixedPrecisionPlan"):
        theirs, ours = import_ratio(statement, 2 if quick else 9)
        table.add_row(statement, "", f"{theirs:.2f} s", f"{ours:.2f} s", f"{ours / theirs:.3f}", "<= 1.10")
    counted = Table("what", *MODES, "asked for", title="Counted, clipping by norm on")
    for name, reads in READS.items():
        own = reads(None)  # what a plain optimizer on the CPU reads of itself: its step counts
        row = [f"{reads(MixedPrecisionPlan(mode)) - own:g}" for mode in MODES]
        counted.add_row(f"host reads a step by the plan, {name}", *row, "0" if name == "fused AdamW" else "<= 1")
    same = [same_as_stock(partial(stock, mode), partial(quiet_plan, mode)) for mode in MODES]
    counted.add_row("weights equal stock's, bit for bit", *("yes" if equal else "NO" for equal in same), "yes")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    console = Console(width=120)
    console.print(table)
    console.print(counted)
    print(f"{device}; torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}")


def processor() -> str:
    """The CPU's name and how many threads torch uses on it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as info:
            name = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
