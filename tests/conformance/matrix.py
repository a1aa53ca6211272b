"""Runs the matrix: strategy by strategy, in processes that live as long as nothing goes wrong in them."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from conformance import compiled, family_runs, judge, plain
from conformance.cells import run_cell
from conformance.judge import Verdict
from conformance.observe import Run
from conformance.rows import ROWS, CompiledRow, FamilyRow
from conformance.strategies import TIMEOUT, environment, world
from support.ranks import RankError, Ranks

Progress = Callable[[str, str, Verdict, float], None]
Key = tuple[str, str]
#: row → what a cell is compared with
References = dict[str, Any]


def on_a_rank(strategy: str, row: str, folder: Path, rates: tuple[float, ...]) -> Any:
    """A cell on this rank; ``rates``, of a family, are the learning rates of its plain loop."""
    if world(strategy) > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TIMEOUT)  # every strategy then uses this group
    of = ROWS[row]
    if isinstance(of, CompiledRow):
        return compiled.run_cell(strategy, of)
    if isinstance(of, FamilyRow):
        return family_runs.run_cell(strategy, of, rates)
    return run_cell(strategy, row, str(folder))


def plain_loop(row: str) -> dict[int, Run] | family_runs.Reference:
    of = ROWS[row]
    return family_runs.reference(of) if isinstance(of, FamilyRow) else plain.reference(of)


@dataclass
class Matrix:
    verdicts: dict[Key, Verdict] = field(default_factory=dict)
    seconds: float = 0.0
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def run(cells: Iterable[Key], progress: Progress) -> Matrix:
    """Every cell, beside a plain loop of its row."""
    matrix, references, columns = Matrix(), References(), dict[str, list[str]]()
    for strategy, row in cells:
        columns.setdefault(strategy, []).append(row)

    def add(strategy: str, row: str, verdict: Verdict, seconds: float) -> None:
        progress(strategy, row, verdict, seconds)
        matrix.verdicts[strategy, row] = verdict
        matrix.seconds += seconds

    for strategy, names in columns.items():
        column(strategy, names, references, add)
    return matrix


def column(
    strategy: str, names: Sequence[str], references: References, progress: Progress | None = None
) -> dict[str, Verdict]:
    """The cells of one strategy by row; ``references`` keeps the plain loops that were run."""
    folder = Path(tempfile.mkdtemp(prefix=f"conformance-{strategy}-"))
    verdicts: dict[str, Verdict] = {}
    missing = [name for name in names if name not in references and not isinstance(ROWS[name], CompiledRow)]
    try:
        with Ranks(1) as one:
            references |= {name: _reference(one, name) for name in missing}
        with Ranks(world(strategy), environment=environment(strategy)) as ranks:
            for name in names:
                start = time.monotonic()
                verdicts[name] = _cell(ranks, strategy, name, references.get(name), folder / f"{len(verdicts)}")
                if progress is not None:
                    progress(strategy, name, verdicts[name], time.monotonic() - start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return verdicts


def _reference(one: Ranks, name: str) -> Any:
    try:
        # the plain loop of a family does not recompute
        name = name.removesuffix("+ckpt") if isinstance(ROWS[name], FamilyRow) else name
        return one.call(plain_loop, name)[0]
    except RankError as error:
        return str(error)


def _cell(ranks: Ranks, strategy: str, name: str, reference: Any, folder: Path) -> Verdict:
    if isinstance(reference, str):
        return Verdict(judge.NO_LOOP, [reference])
    row, of_family = ROWS[name], isinstance(reference, family_runs.Reference)
    folder.mkdir()
    try:
        cells = ranks.call(on_a_rank, strategy, name, folder, reference.rates if of_family else ())
    except RankError as error:
        return Verdict(judge.FAILED, [str(error)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(row, CompiledRow):
        verdict = compiled.judge(strategy, row, cells)
    elif isinstance(row, FamilyRow):
        verdict = family_runs.judge(row, cells, reference)
    else:
        verdict = judge.judge(strategy, row, cells, reference[world(strategy)])
    if verdict.word == judge.FAILED:  # a rank that raised leaves the other's collectives behind
        ranks.stop(kill=True)
    return verdict
