"""A run of the matrix that was interrupted is taken up where it ended."""

from __future__ import annotations

import pickle
from pathlib import Path

from conformance import matrix
from conformance.judge import SAME, Verdict
from conformance.matrix import Matrix


def test_kept_cells_are_not_run_again(tmp_path: Path) -> None:
    first, second = ("single", "bf16-mixed"), ("no such strategy", "32-true")
    kept = tmp_path / "kept"
    kept.write_bytes(pickle.dumps(Matrix({second: Verdict(SAME), first: Verdict(SAME)}, seconds=3.0)))
    result = matrix.run([first, second], lambda *_: None, kept)
    assert list(result.verdicts) == [first, second]
    assert result.seconds == 3.0


def test_a_cell_is_kept_as_soon_as_it_ended(tmp_path: Path) -> None:
    cell, kept = ("single", "32-true"), tmp_path / "kept"
    result = matrix.run([cell], lambda *_: None, kept)
    assert result.verdicts[cell].word == SAME
    assert pickle.loads(kept.read_bytes()) == result
