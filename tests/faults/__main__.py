"""``python -m faults``: every fault over several seeds, three healthy runs, and one table."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.table import Table

from faults import inject
from faults.judge import WITHIN, Row, missed
from faults.run import healthy, row
from faults.scenarios import HEALTHY, SCENARIOS
from lightning_mp.monitor.health import throughput
from support.clock import SteadyClock

HEADINGS = ("fault", f"found within {WITHIN} steps", "median step", "module or rank right", "false alerts")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 where every target is met."""
    parser = argparse.ArgumentParser(prog="faults", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="runs a fault")
    parser.add_argument("--steps", type=int, default=2000, help="of each healthy run; 0 leaves them out")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="faults whose name has one of these")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # small products gain nothing from a second one
    clock: Any = SteadyClock()  # a busy machine's own would make steps look slow that are not
    throughput.time = inject.time = clock
    table, rows = Table(*HEADINGS, title="Faults put into healthy runs"), list[Row]()
    for number, scenario in enumerate(SCENARIOS):
        if any(word in scenario.title for word in options.only):
            rows.append(row(number, options.seeds))
            for seed, verdict in enumerate(rows[-1].verdicts):
                if not verdict.good:
                    print(f"{scenario.title}, seed {seed}: {verdict}, saw {list(verdict.seen)}", file=sys.stderr)
    rows += [healthy(*each, options.steps) for each in HEALTHY if options.steps]
    for each in rows:
        table.add_row(*each.cells())
    words = missed(rows)
    Console().print(table, *(f"missed: {word}" for word in words), sep="\n")
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
