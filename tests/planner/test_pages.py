"""The pages that the planner writes are what it says now."""

from __future__ import annotations

from benchmarks import planner_pages
from support.docs import text


def test_the_guides_tables_are_those_of_the_code() -> None:
    page = text("docs/PARALLELISM_GUIDE.md")
    assert page == planner_pages.guide(page), "run: python -m benchmarks.planner_pages"
