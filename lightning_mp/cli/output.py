"""Shared by all commands: refuse with one message, show progress, and print tables."""

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
# a pipe or a file has no width of its own, and a line of a table needs this one
_PLAIN_WIDTH = 110
_FAILED, _USAGE_ERROR = 1, 2
_INTERRUPTED = 130


def count(text: str) -> float:
    """Return the number in ``7e9`` or ``7b``; raise ``typer.BadParameter`` for other text."""
    unit = _UNITS.get(text[-1:].lower())
    try:
        return float(text) if unit is None else float(text[:-1]) * unit
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number; write it as 7e9 or 7b") from None


def load_parts():  # a module's type has no name
    """Import and return :mod:`lightning_mp.cli.parts`, which builds and runs models.

    Python's garbage collector is off during the first import, because it would take a third of the
    time. Afterwards the imported objects are frozen: later collections leave them out.
    """
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
    """Turn errors within into a message and an exit status.

    PlanError, MissingExtraError and ``also`` leave with status 2, NonFiniteError with 1, and
    Ctrl-C with 130. Every other exception is raised unchanged, so it keeps its traceback.
    """
    from lightning_mp.errors import MissingExtraError, NonFiniteError, PlanError

    try:
        yield
    except PlanError as error:
        refuse(command, error.listed())
    except BrokenPipeError:
        raise  # the reader of the pipe has closed it (| head): click then leaves silently
    except NonFiniteError as error:
        refuse(command, str(error), _FAILED)
    except (MissingExtraError, *also) as error:
        refuse(command, str(error))
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None


def refuse(command: str, message: str, status: int = _USAGE_ERROR) -> NoReturn:
    """Print a message to stderr and raise ``typer.Exit`` with ``status``."""
    typer.echo(f"lightning-mp {command}: {message}", err=True)
    raise typer.Exit(status) from None


def progress(text: str) -> None:
    """Print ``text`` to stderr if it is a terminal. It names a step that takes time."""
    if sys.stderr.isatty():
        typer.echo(text, err=True)


def console() -> Console:
    """Return the console for tables. If stdout is no terminal, it is at least 110 columns wide."""
    from rich.console import Console

    plain = Console()
    return plain if plain.is_terminal else Console(width=max(plain.width, _PLAIN_WIDTH))
