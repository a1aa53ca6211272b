"""What watching costs: step time with TrainingHealth every step and LossScaleMonitor on, against the same without.

Both sides are interleaved step by step in one run, watched and not watched in turn, so that a busy machine is equally
busy for both; what is printed are medians, their ratio, and host reads counted.
``python -m benchmarks.monitors [--quick]``
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import tempfile
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode

from benchmarks.fit import fit
from benchmarks.run import MODES, WARM_UP, StepTimes, processor, quiet_plan, stock
from benchmarks.shapes import SHAPES, Shape
from lightning_mp.callbacks import LossScaleMonitor, TrainingHealth

#: how a tensor's value comes to the host
_READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
TARGETS = {"compute-bound GPT-2": "<= 1.03", "tiny MLP": ""}
SIDES = {"stock": stock, "plan": quiet_plan}


def monitors(folder: str, every: int = 1) -> list[Callback]:
    """Both monitors; no report at the end, which is no step."""
    return [TrainingHealth(folder, every, report=False), LossScaleMonitor(every)]


def run(shape: Shape, plugin: Any, callbacks: list[Callback], steps: int) -> None:
    """One short fit."""
    torch.manual_seed(0)
    fit(shape.module(), shape.data(), plugin, steps, callbacks=callbacks, gradient_clip_val=1.0)


class EverySecond(Callback):
    """Hands the hooks of a step on to the monitors in every second step alone; every other hook always."""

    def __init__(self, callbacks: list[Callback], odd: bool) -> None:
        self.callbacks, self.odd, self.on = callbacks, odd, True

    def on_train_start(self, *given: Any) -> None:
        """Let them begin."""
        for callback in self.callbacks:
            callback.on_train_start(*given)

    def on_train_batch_start(self, trainer: Trainer, *given: Any) -> None:
        """Take turns, once FLOPs are counted."""
        self.on = trainer.global_step == 0 or trainer.global_step % 2 == self.odd
        self._hand_on("on_train_batch_start", trainer, *given)

    def on_before_backward(self, *given: Any) -> None:
        """Hand on."""
        self._hand_on("on_before_backward", *given)

    def on_before_optimizer_step(self, *given: Any) -> None:
        """Hand on."""
        self._hand_on("on_before_optimizer_step", *given)

    def on_train_batch_end(self, *given: Any) -> None:
        """Hand on."""
        self._hand_on("on_train_batch_end", *given)

    def teardown(self, *given: Any, **named: Any) -> None:
        """Let them end."""
        for callback in self.callbacks:
            callback.teardown(*given, **named)

    def _hand_on(self, name: str, *given: Any) -> None:
        for callback in self.callbacks if self.on else ():
            getattr(callback, name)(*given)


def compare(shape: Shape, side: str, mode: str, rounds: int, steps: int) -> tuple[float, float]:
    """Median seconds a step: (without, with)."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for odd in (bool(number % 2) for number in range(rounds)):
        times = StepTimes()
        with tempfile.TemporaryDirectory() as folder:
            run(shape, SIDES[side](mode), [EverySecond(monitors(folder), odd), times], steps)
        for step, second in enumerate(times.seconds, start=WARM_UP):  # the first kept is that of step WARM_UP
            seconds[step % 2 == odd].append(second)
    return statistics.median(seconds[False]), statistics.median(seconds[True])


class CountReads(TorchFunctionMode, Callback):
    """Counts, in each batch, how often a tensor's value was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, and count it if it reads."""
        self.counts[-1] += getattr(func, "__name__", "") in _READS
        return func(*args, **(kwargs or {}))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to watch."""
        self.counts.append(0)
        self.__enter__()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Stop watching."""
        self.__exit__(None, None, None)


def reads(shape: Shape, mode: str, every: int) -> list[int]:
    """Host reads of the monitors in each of eight steps under a plan, beyond those of the same run without them."""
    counted: list[list[int]] = []
    for watched in (False, True):
        count = CountReads()
        with tempfile.TemporaryDirectory() as folder:
            run(shape, quiet_plan(mode), [*(monitors(folder, every) if watched else []), count], 8)
        counted.append(count.counts)
    return [ours - without for without, ours in zip(*counted, strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run: the figures mean nothing")
    quick = parser.parse_args().quick
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    table = Table("shape", "plugin", "mode", "without", "with", "ratio", "asked for", title="Step times, interleaved")
    for shape in SHAPES:
        rounds, steps = (2, WARM_UP + 4) if quick else (shape.rounds, 2 * shape.steps)
        for side in SIDES:
            for mode in MODES:
                without, watched = compare(shape, side, mode, rounds, steps)
                times = f"{without * 1e3:.3f} ms", f"{watched * 1e3:.3f} ms", f"{watched / without:.3f}"
                table.add_row(shape.name, side, mode, *times, TARGETS[shape.name])
                print(f"{shape.name}, {side}, {mode}: {watched / without:.3f}", flush=True)
    Console(width=120).print(table)
    for every in (1, 4):
        print(f"host reads in each of 8 steps, a reading every {every}: {reads(SHAPES[1], '16-mixed', every)}")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    print(f"{device}; torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}")


if __name__ == "__main__":
    main()
