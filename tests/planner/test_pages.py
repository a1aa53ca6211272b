"""The pages that the planner writes are what it says now."""

from __future__ import annotations

from benchmarks import planner_pages
from support.docs import text


def test_the_guide_is_written_by_the_code() -> None:
    assert text("docs/PARALLELISM_GUIDE.md") == planner_pages.guide(), "run: python -m benchmarks.planner_pages"
