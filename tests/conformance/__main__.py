"""``python -m conformance``: the whole matrix, into docs/conformance.txt and docs/reference/conformance.md."""

import argparse
import os
import sys
from fnmatch import fnmatchcase
from pathlib import Path

from conformance import matrix, report
from conformance.judge import Verdict
from conformance.rows import TABLES, choose
from conformance.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]


def _progress(strategy: str, row: str, verdict: Verdict, seconds: float) -> None:
    first = verdict.reasons[0].strip().splitlines() if verdict.reasons else [""]
    why = first[-1] if verdict.word == "FAILED" else " ".join(first)
    print(f"{strategy:24} {row:30} {verdict.word:8} {seconds:5.1f} s  {why[:300]}", flush=True)
    for reason in verdict.reasons[1:]:
        if verdict.word == "DIFFERS":
            print(f"{'':58}{reason[:300]}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 where every cell is the same or refused."""
    parser = argparse.ArgumentParser(prog="conformance", description=__doc__)
    parser.add_argument("--table", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES, metavar="NAME")
    parser.add_argument("--rows", nargs="+", metavar="PATTERN", default=["*"], help='such as "*+pins*" or "moe *"')
    parser.add_argument("--out", type=Path, help="by default docs/conformance.txt, if nothing is filtered")
    parser.add_argument("--sample", metavar="SEED", help="cells that cover each two of strategy, mode and flags")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".venv" / "torch_extensions"))
    every = [(column, row) for rows, columns in TABLES.values() for column in columns for row in rows]
    rows = [row for table in options.table for row in TABLES[table][0]]
    rows = [row for row in rows if any(fnmatchcase(row, pattern) for pattern in options.rows)]
    cells = [(column, row) for column, row in every if column in options.strategies and row in rows]
    whole = cells == every
    if options.sample is not None:
        whole, cells = False, choose(cells, options.sample)
        print(f"{len(cells)} cells chosen by the seed {options.sample!r}")
    result = matrix.run(cells, _progress)
    out = options.out or (report.FULL if whole else None)
    if out is not None:
        out.write_text(report.text(result))
        print(f"wrote {out}")
    if whole:
        words = {key: verdict.word for key, verdict in result.verdicts.items()}
        report.PAGE.write_text(report.summary(words))
    bad = [key for key, verdict in result.verdicts.items() if not verdict.good]
    print(f"{len(result.verdicts) - len(bad)} of {len(result.verdicts)} cells are as declared, {result.seconds:.0f} s")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
