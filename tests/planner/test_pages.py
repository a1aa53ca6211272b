"""The pages that the planner writes are what it says now."""

from __future__ import annotations

import re

from benchmarks import planner_pages
from support.docs import text


def test_the_guide_is_written_by_the_code() -> None:
    assert text("docs/PARALLELISM_GUIDE.md") == planner_pages.guide(), "run: python -m benchmarks.planner_pages"


def test_each_question_has_one_command_and_what_it_prints() -> None:
    """tests/docs runs the commands, and compares the output."""
    questions = re.split(
        r"^\*\*", text("docs/how-to/plan-a-run.md").split("## Questions")[1].split("\n## ")[0], flags=re.MULTILINE
    )[1:]
    assert len(questions) == 5
    for each in questions:
        assert re.findall(r"^```(\w+)", each, re.MULTILINE) == ["bash", "text"], each
