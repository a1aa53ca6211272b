"""The bytes in docs/reference/strategies.md: no figure passes its formula, and the page is what was measured."""

from __future__ import annotations

import pytest

from conformance import moved
from support.ranks import Ranks

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gloo, pytest.mark.slow]


def test_figures_keep_to_their_formulas_and_are_on_the_page(ranks: Ranks) -> None:
    measured = moved.measure(ranks)
    assert moved.faults(measured, moved.elements()) == []
    assert moved.table(measured) in moved.PAGE.read_text(encoding="utf-8")
