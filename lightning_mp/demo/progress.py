"""Live progress: a bar a mode on a terminal, a line every tenth of the way elsewhere."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from lightning_mp.demo.records import Reading

_NAME_WIDTH = 9


class View(Protocol):
    """What the demo tells while it runs."""

    def start(self, mode: str, steps: int) -> None:
        """A mode begins."""
        ...

    def step(self, reading: Reading) -> None:
        """A step of the current mode is done."""
        ...

    def note(self, mode: str, text: str) -> None:
        """A mode has something to say instead of, or after, its steps."""
        ...


class Bars:
    """The terminal's view."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = TaskID(0)

    def start(self, mode: str, steps: int) -> None:
        """Add a bar."""
        self._task = self._progress.add_task(mode, total=steps, reading="starting")

    def step(self, reading: Reading) -> None:
        """Move the current bar."""
        self._progress.update(self._task, completed=reading.step, reading=describe(reading))

    def note(self, mode: str, text: str) -> None:
        """Print above the bars."""
        self._progress.console.print(f"{mode:<{_NAME_WIDTH}} {text}", highlight=False, markup=False)


class Lines:
    """The view of a log file or a pipe: plain text, no control characters."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._mode = ""
        self._steps = 1

    def start(self, mode: str, steps: int) -> None:
        """Remember whose lines follow."""
        self._mode, self._steps = mode, steps

    def step(self, reading: Reading) -> None:
        """Print a step when another tenth is done."""
        if reading.step * 10 // self._steps > (reading.step - 1) * 10 // self._steps:
            width = len(str(self._steps))
            self.note(self._mode, f"{reading.step:>{width}}/{self._steps}  {describe(reading)}")

    def note(self, mode: str, text: str) -> None:
        """Print a line."""
        self._console.print(f"{mode:<{_NAME_WIDTH}} {text}", highlight=False, markup=False, soft_wrap=True)


@contextmanager
def view(console: Console) -> Generator[View]:
    """The view that fits the console."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        # before the text, which may be cut off on a narrow terminal
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        TextColumn("{task.fields[reading]}"),
    )
    with Progress(*columns, console=console) as progress:
        yield Bars(progress)


def describe(reading: Reading) -> str:
    """Loss, and where there is loss scaling the scale and the skipped steps."""
    text = f"loss {reading.loss:.3f}"
    if reading.scale is not None:
        text += f"  scale {scale_text(reading.scale)}  skipped {reading.skipped}"
    return text


def scale_text(scale: float) -> str:
    """``2^17`` for a power of two, which a scale nearly always is."""
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:.4g}"
