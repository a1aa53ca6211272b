"""The matrix in one table, docs/reference/conformance.md; the full tables are docs/conformance.txt."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from conformance.policies import MODES, POLICIES
from conformance.rows import TABLES
from conformance.strategies import STRATEGIES

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FULL = DOCS / "reference" / "conformance.md", DOCS / "conformance.txt"

_PAGE = """# Conformance

`make conformance` wrote this page. It trains every mode, with and without pins and activation checkpointing, under
every strategy: 20 steps, in two processes on a CPU. It compares each run with a plain PyTorch loop.

{table}

*same* means: losses, clipping norms and weights are those of the plain loop. Parameters, products, sums and optimizer
state have the declared dtypes. A step that overflows on one rank is skipped on all, and changes nothing. A resumed run
ends bit for bit where the uninterrupted run ends.

*no pins* means: the same without pins, and refused with them. *refused* means: an error before the first optimizer
step, with what to write instead.

The column of optimizers counts runs under `16-mixed`.{families}
[The full tables](../conformance.txt) have every cell, the reason of each refusal, and what was observed.
"""


_FAMILIES = """
That of families counts 71 families of models in every mode: plain, with pinned norms, with recomputed blocks. *-* are
runs in which plain PyTorch itself raises."""


def summary(words: Mapping[tuple[str, str], str]) -> str:
    """The page, of the word (``same``, ``refused``, …) of each strategy and row."""
    tables = {_table(row) for _, row in words}
    others = [table for table in TABLES if table != "plan" and table in tables]
    lines = [["strategy", *(f"`{mode}`" for mode in MODES), *others]]
    lines.append(["---"] * len(lines[0]))
    for strategy in STRATEGIES:
        modes = [
            _mode({name: words[strategy, name] for name, policy in POLICIES.items() if policy.mode == mode})
            for mode in MODES
        ]
        found = [
            [word for (column, row), word in words.items() if (column, table) == (strategy, _table(row))]
            for table in others
        ]
        lines.append([f"`{strategy}`", *modes, *(_counts(each) for each in found)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return _PAGE.format(table=table, families=_FAMILIES if "families" in others else "")


def _table(row: str) -> str:
    return "families" if ": " in row else next((name for name in ("plan", "optimizers") if row in TABLES[name][0]), "")


def _mode(found: Mapping[str, str]) -> str:
    if len(set(found.values())) == 1:
        return next(iter(found.values()))
    plain = {word for name, word in found.items() if not POLICIES[name].pins}
    pinned = {word for name, word in found.items() if POLICIES[name].pins}
    return "no pins" if (plain, pinned) == ({"same"}, {"refused"}) else _counts(found.values())


def _counts(found: Iterable[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(found).items()) or "-"


def written(full: str) -> dict[tuple[str, str], str]:
    """The word of each strategy and row, out of the full tables."""
    words: dict[tuple[str, str], str] = {}
    head: list[str] = []
    for line in full.partition("\n## Observed")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not cells[0]:
            head = cells
        elif cells and cells[0].startswith("`"):
            row = cells[0].strip("`")
            for column, cell in zip(head[1:], cells[1:], strict=True):
                plain = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹]", "", cell)
                many = re.findall(r"(\d+) (\w+|-)", plain)  # of a family: how many of its policies
                each = [word for count, word in many for _ in range(int(count))]
                words |= {(column, f"{row}: {number}"): word for number, word in enumerate(each)}
                if cell and not many:
                    words[column, row] = re.sub(r"\W", "", plain)
    return words
