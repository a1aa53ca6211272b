"""The smaller matrix: a row of each table under every strategy, in real processes; ``make conformance`` runs all."""

from __future__ import annotations

import pytest

from conformance import matrix
from conformance.judge import REFUSED, SAME
from conformance.rows import TABLES

pytestmark = pytest.mark.gloo

#: the rows whose cells are run, one a table
ROWS = ("16-mixed+pins", "whisper: 16-mixed+pins", "lion 16-mixed")
#: strategy → row → the word of its cell, where that is not "same"
EXPECTED: dict[str, dict[str, str]] = {
    "single": {},
    "ddp": {},
    "ddp@pytorch_lightning": {},
    "fsdp2": {},
    "fsdp1": {"16-mixed+pins": REFUSED},
    "deepspeed_zero2": {},
    "deepspeed_zero3": {},
}


@pytest.fixture(scope="module")
def references() -> matrix.References:
    """The plain loops."""
    return {}


#: the others are in the slow tests, and in CI's sample
FAST = ("single",)


@pytest.mark.parametrize(
    "strategy", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in EXPECTED]
)
def test_every_cell_ends_as_expected(strategy: str, references: matrix.References) -> None:
    names = [row for rows, columns in TABLES.values() for row in rows if row in ROWS and strategy in columns]
    verdicts = matrix.column(strategy, names, references)
    words = {name: EXPECTED[strategy].get(name, SAME) for name in names}
    said = {name: "\n".join(verdict.reasons) for name, verdict in verdicts.items()}
    assert {name: verdict.word for name, verdict in verdicts.items()} == words, said


#: cells that were something else once, by what is special about them
OTHERS = [
    ("fsdp2", "muon 16-mixed", SAME),
    ("fsdp2", "sam bf16-mixed", REFUSED),
    ("deepspeed_zero2", "mamba: bf16-mixed", SAME),
    ("ddp", "fp8 weights + lora: bf16-mixed", SAME),
    ("fsdp2", "adamw_8bit 16-mixed", SAME),
    ("deepspeed_zero2", "adamw_8bit 16-mixed", REFUSED),
]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "row", "word"), OTHERS)
def test_a_cell(strategy: str, row: str, word: str, references: matrix.References) -> None:
    if row.startswith("adamw_8bit"):
        pytest.importorskip("torchao")
    verdict = matrix.column(strategy, [row], references)[row]
    assert verdict.word == word, verdict.reasons
