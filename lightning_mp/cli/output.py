"""What every command does alike: refuse in one message, and print tables."""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, Optional

import typer

if TYPE_CHECKING:
    from rich.console import Console

Whole = Optional[int]  # noqa: UP045  typer reads these at run time, on 3.10 too
Number = Optional[float]  # noqa: UP045
Text = Optional[str]  # noqa: UP045
File = Optional[Path]  # noqa: UP045
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]
_UNITS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
# What a line of a table needs; a pipe or a file has no width of its own.
_PLAIN_WIDTH = 110
_FAILED, _USAGE_ERROR = 1, 2
_INTERRUPTED = 130


def count(text: str) -> float:
    """How many, from ``7e9`` or ``7b``."""
    unit = _UNITS.get(text[-1:].lower())
    try:
        return float(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; write it as 7e9 or 7b") from None


def load_parts():  # a module's type has no name
    """What builds and runs a model. Looking for garbage in its thousands of modules would take a third of the time."""
    if "lightning_mp.cli.parts" not in sys.modules and gc.isenabled():
        gc.disable()
        try:
            from lightning_mp.cli import parts
        finally:
            gc.enable()
        gc.freeze()
    from lightning_mp.cli import parts

    return parts


@contextmanager
def refusals(command: str, *also: type[Exception]) -> Generator[None]:
    """Leave with a message and status 2 for this package's errors and ``also``, 1 for non-finite training.

    130 is Ctrl-C's. What the user's own code raises keeps its traceback.
    """
    from lightning_mp.errors import MissingExtraError, NonFiniteError, PlanError

    try:
        yield
    except PlanError as error:
        refuse(command, error.listed())
    except BrokenPipeError:
        raise  # whoever reads has enough (| head): click leaves without a word
    except NonFiniteError as error:
        refuse(command, str(error), _FAILED)
    except (MissingExtraError, *also) as error:
        refuse(command, str(error))
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def refuse(command: str, message: str, status: int = _USAGE_ERROR) -> NoReturn:
    """Leave with a message and ``status``."""
    typer.echo(f"lightning-mp {command}: {message}", err=True)
    raise typer.Exit(status) from None


def progress(text: str) -> None:
    """Say to who looks at a terminal what takes its time."""
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def console() -> Console:
    """Where tables are printed."""
    from rich.console import Console

    plain = Console()
    return plain if plain.is_terminal else Console(width=max(plain.width, _PLAIN_WIDTH))
