"""Runs the matrix: strategy by strategy, in processes that live as long as nothing goes wrong in them."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from conformance import judge
from conformance.cells import Cell, run_cell
from conformance.judge import Verdict
from conformance.observe import Run
from conformance.policies import POLICIES
from conformance.strategies import TIMEOUT, environment, world
from support.ranks import RankError, Ranks

Progress = Callable[[str, str, Verdict, float], None]
Key = tuple[str, str]


@dataclass(frozen=True)
class OnRanks:
    """A cell, on every rank."""

    strategy: str
    policy: str
    folder: Path

    def run(self) -> Cell:
        if world(self.strategy) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=TIMEOUT)  # every strategy then uses this group
        return run_cell(self.strategy, self.policy, str(self.folder))


@dataclass
class Matrix:
    """Verdicts by (strategy, policy), and what they took."""

    verdicts: dict[Key, Verdict] = field(default_factory=dict)
    seconds: float = 0.0
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))


def run(cells: Iterable[Key], progress: Progress) -> Matrix:
    """Every cell; what they need of ``single`` always, as what the others are compared with."""
    start = time.monotonic()
    columns: dict[str, list[str]] = {"single": []}
    for strategy, policy in cells:
        columns.setdefault(strategy, []).append(policy)
    columns["single"] = [name for name in POLICIES if any(name in names for names in columns.values())]
    matrix, references = Matrix(), {}
    for strategy, names in columns.items():
        verdicts = column(strategy, names, references, progress)
        matrix.verdicts |= {(strategy, name): verdict for name, verdict in verdicts.items()}
    matrix.seconds = time.monotonic() - start
    return matrix


def column(
    strategy: str, names: Sequence[str], references: dict[str, Run], progress: Progress | None = None
) -> dict[str, Verdict]:
    """The cells of one strategy by policy; ``single`` fills ``references``, the others are compared with them."""
    folder = Path(tempfile.mkdtemp(prefix=f"conformance-{strategy}-"))
    verdicts: dict[str, Verdict] = {}
    try:
        with Ranks(world(strategy), environment=environment(strategy)) as ranks:
            for name in names:
                start = time.monotonic()
                verdicts[name] = _cell(ranks, strategy, name, references, folder / name)
                if progress is not None:
                    progress(strategy, name, verdicts[name], time.monotonic() - start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return verdicts


def _cell(ranks: Ranks, strategy: str, name: str, references: dict[str, Run], folder: Path) -> Verdict:
    folder.mkdir()
    try:
        cells: list[Cell] = ranks.run(OnRanks(strategy, name, folder))
    except RankError as error:
        return Verdict(judge.FAILED, [str(error)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if strategy == "single" and not cells[0].word:
        references[name] = cells[0].runs["main"]
    reference = cells[0].runs.get("plain") if strategy == "single" else references.get(name)
    verdict = judge.judge(strategy, POLICIES[name], cells, reference)
    if verdict.word == judge.FAILED:  # a rank that raised leaves the other's collectives behind
        ranks.stop(kill=True)
    return verdict
