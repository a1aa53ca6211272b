"""The rows as a table that people can read."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from faults.judge import WITHIN, Row


def table(rows: Sequence[Row]) -> Table:
    """A line a fault, and a line a healthy run."""
    made = Table(title="Faults put into healthy runs", title_justify="left")
    made.add_column("fault", overflow="fold")
    for heading in (f"found within {WITHIN} steps", "median step", "module or rank right", "false alerts"):
        made.add_column(heading, justify="right")
    for row in rows:
        made.add_row(*cells(row), style="" if well(row) else "bold red")
    return made


def well(row: Row) -> bool:
    """Whether nothing of it needs a look."""
    return row.found == len(row.verdicts) and not row.false and not row.notes


def cells(row: Row) -> list[str]:
    """What the table says of a row."""
    if not row.verdicts:
        return [row.title, "-", "-", "-", str(len(row.false))]
    right, asked = row.named
    steps = row.median_steps
    return [
        row.title,
        f"{row.found} of {len(row.verdicts)}",
        "-" if steps is None else f"{steps:g}",
        f"{right} of {asked}" if asked else "-",
        str(len(row.false)),
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The same as a table in a text file."""
    headings = ["fault", f"found within {WITHIN} steps", "median step", "module or rank right", "false alerts"]
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
