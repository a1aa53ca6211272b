"""``python -m faults``: every fault over several seeds, three healthy runs, and one table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console

from faults.judge import Row, missed
from faults.run import healthy, row
from faults.scenarios import HEALTHY, SCENARIOS
from faults.table import markdown, table

#: of the table in a file
WIDTH = 120


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 where every target is met."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="runs a fault")
    parser.add_argument("--steps", type=int, default=2000, help="of each healthy run; 0 leaves them out")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="faults whose name has one of these")
    parser.add_argument("--out", type=Path, help="also write the table here, in Markdown")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # small products gain nothing from a second one
    console, started = Console(), time.perf_counter()
    if not console.is_terminal:
        console.width = WIDTH
    rows: list[Row] = []
    for number, scenario in enumerate(SCENARIOS):
        if any(word in scenario.title for word in options.only):
            rows.append(row(number, options.seeds))
            _progress(rows[-1])
    for title, precision, settings in HEALTHY if options.steps else ():
        rows.append(healthy(title, precision, settings, options.steps))
        _progress(rows[-1])
    console.print(table(rows))
    if options.out is not None:
        options.out.write_text(markdown(rows), encoding="utf-8")
    words = missed(rows)
    for word in words:
        console.print(f"missed: {word}", style="red", markup=False)
    console.print(f"{'targets missed' if words else 'all targets met'}, {time.perf_counter() - started:.0f} s")
    return 1 if words else 0


def _progress(made: Row) -> None:
    print(f"{made.title}: {made.found} of {len(made.verdicts)}" if made.verdicts else made.title, file=sys.stderr)
    for seed, verdict in enumerate(made.verdicts):
        if not verdict.good:
            print(f"  seed {seed}: {verdict}, saw {list(verdict.seen)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
