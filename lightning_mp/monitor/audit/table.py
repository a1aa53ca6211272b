"""Rows of an audit as a table: repeated layers that are alike share a line, ``layers.[0-31].mlp.up_proj``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, Protocol

COLUMNS = ("declared", "param", "input", "output", "compute", "grad", "reduce", "optimizer_state")
_HEADS = {"optimizer_state": "state"}
_NOTHING = "-"
_STAR = (
    "* not a difference: norms, look-ups and elementwise work may run in fp32 (torch's autocast lists, or the module's "
    "own code), and fp32 products in TF32 where torch's switches allow it"
)
#: less of a name would tell nothing
_LEAST = 20


class Row(Protocol):
    """What a table needs of a row, beside the other columns."""

    @property
    def module(self) -> str: ...

    @property
    def declared(self) -> str | None: ...

    @property
    def param(self) -> str | None: ...

    @property
    def compute(self) -> str | None: ...

    @property
    def ok(self) -> bool: ...


def shown(module: str) -> str:
    """A module's name; the root has none."""
    return module or "(the root module)"


def text(rows: Sequence[Row], width: int) -> list[str]:
    """Lines of at most ``width`` characters, unless the dtypes alone take more; ``!`` marks what differs."""
    lines = [(" " if ok else "!", name, cells) for name, cells, ok in _lines(rows)]
    heads = [_HEADS.get(column, column) for column in COLUMNS]
    widths = [max(len(head), *(len(cells[i]) for _, _, cells in lines), 1) for i, head in enumerate(heads)]
    room = max(_LEAST, width - sum(widths) - 2 * len(widths) - 2)
    below = _above_all([row.module for row in rows]) if any(len(name) > room for _, name, _ in lines) else ""
    lines = [(mark, name.removeprefix(below), cells) for mark, name, cells in lines]
    head = f"module in {below[:-1]}" if below else "module"
    longest = min(room, max(len(name) for name in (head, *(name for _, name, _ in lines))))
    found = [("  ", _cut(head, longest), heads), ("  ", "-" * longest, ["-" * size for size in widths])]
    found += [(f"{mark} ", _cut(name, longest), cells) for mark, name, cells in lines]
    return [
        (
            mark
            + name.ljust(longest)
            + "".join("  " + cell.ljust(size) for cell, size in zip(cells, widths, strict=True))
        ).rstrip()
        for mark, name, cells in found
    ]


def _above_all(names: Sequence[str]) -> str:
    """The dotted beginning, with its dot, that all names share; none where a name is nothing more."""
    parts = [name.split(".")[:-1] for name in names]
    shared = list(takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False)))
    return "".join(f"{same[0]}." for same in shared)


def markdown(rows: Sequence[Row]) -> list[str]:
    """Lines of a markdown table."""
    heads = ["module", *(_HEADS.get(column, column) for column in COLUMNS), "ok"]
    lines = [_piped(heads), _piped(["---"] * len(heads))]
    return lines + [_piped([f"`{name}`", *cells, "yes" if ok else "**no**"]) for name, cells, ok in _lines(rows)]


def _piped(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cut(name: str, room: int) -> str:
    return name if len(name) <= room else "…" + name[len(name) - room + 1 :]


def _lines(rows: Sequence[Row]) -> Iterator[tuple[str, list[str], bool]]:
    """Name or range of names, the columns, and whether it is as declared; in the order of the rows."""
    by_name = {row.module: row for row in rows}
    keys: dict[str, Any] = {
        name: (row.ok, tuple(_cell(row, column) for column in COLUMNS)) for name, row in by_name.items()
    }
    for name, first in grouped(keys):
        ok, cells = keys[first]
        yield shown(name), list(cells), ok


def _cell(row: Row, column: str) -> str:
    note = ""
    if column == "compute" and _unlike(row):
        note = "*"
    elif column == "declared" and _unlike(row) and row.compute == "fp32" == row.param:
        note = " (autocast)"  # whose lists decide, where fp32 weights are declared to be computed with in half
    return (getattr(row, column) or _NOTHING) + note


def _unlike(row: Row) -> bool:
    """It computes in something else than declared, rightly so."""
    return row.ok and row.declared is not None and row.compute not in (row.declared, None)


def footnotes(rows: Sequence[Row]) -> list[str]:
    """What the star in the table means, where there is one."""
    return [_STAR] if any(map(_unlike, rows)) else []


def ranges(names: Sequence[str]) -> list[str]:
    """``names`` with those of repeated layers put together."""
    return [shown(name) for name, _ in grouped(dict.fromkeys(names))]


def grouped(keys: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names of equal keys that differ in one number, put together where the numbers follow each other; and the first.

    Each number in a name is tried, outermost first, so that layers go together before what is within them. One at the
    end is left alone: what a ``Sequential`` holds need not be alike.
    """
    lines = [(name, name, key) for name, key in keys.items()]
    depth = max((name.count(".") for name in keys), default=0)
    for place in range(depth):
        lines = _merged(lines, place)
    yield from ((name, first) for name, first, _ in lines)


def _merged(lines: Sequence[tuple[str, str, Any]], place: int) -> list[tuple[str, str, Any]]:
    """Put lines together that differ in the number at ``place`` of their dotted names alone, and follow each other."""
    runs: dict[Any, list[list[int]]] = {}
    found: dict[Any, tuple[str, str, Any]] = {}
    for name, first, key in lines:
        parts = name.split(".")
        if place >= len(parts) - 1 or not parts[place].isdigit():
            found[name, None, 0] = name, first, key
            continue
        number = int(parts[place])
        same = (tuple(parts[:place]), tuple(parts[place + 1 :]), key)
        before = runs.setdefault(same, [])
        if before and before[-1][1] == number - 1:
            before[-1][1] = number
        else:
            before.append([number, number])
        low, high = before[-1]
        parts[place] = str(low) if low == high else f"[{low}-{high}]"
        kept = found.get((same, low, 1), ("", first, key))
        found[same, low, 1] = ".".join(parts), kept[1], key
    return list(found.values())
