"""The smaller matrix: one policy under every strategy, in real processes. ``make conformance`` runs all of it."""

from __future__ import annotations

import pytest

from conformance import matrix
from conformance.judge import SAME
from conformance.observe import Run

pytestmark = pytest.mark.gloo

POLICIES = ("16-mixed+pins",)
#: strategy → policy → the word of its cell, where that is not "same"
EXPECTED: dict[str, dict[str, str]] = {
    "ddp": {},
    "ddp@pytorch_lightning": {},
    "fsdp2": {},
    "hsdp": {},
    "fsdp1": {},
    "deepspeed_zero1": {},
    "deepspeed_zero2": {},
    "deepspeed_zero3": {},
}


@pytest.fixture(scope="module")
def references() -> dict[str, Run]:
    """The runs on a single device."""
    found: dict[str, Run] = {}
    verdicts = matrix.column("single", POLICIES, found)
    assert {name: verdict.reasons for name, verdict in verdicts.items()} == {name: [] for name in POLICIES}
    assert {verdict.word for verdict in verdicts.values()} == {SAME}
    return found


@pytest.mark.parametrize("strategy", EXPECTED)
def test_every_cell_ends_as_expected(strategy: str, references: dict[str, Run]) -> None:
    verdicts = matrix.column(strategy, POLICIES, references)
    words = {name: EXPECTED[strategy].get(name, SAME) for name in POLICIES}
    said = {name: "\n".join(verdict.reasons) for name, verdict in verdicts.items()}
    assert {name: verdict.word for name, verdict in verdicts.items()} == words, said
