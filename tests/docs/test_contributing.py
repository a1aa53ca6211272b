"""The recipes of CONTRIBUTING.md name files, and what is in them, that are there."""

from __future__ import annotations

import re

import pytest

from support.docs import ROOT, text

PAGE = text("CONTRIBUTING.md")
WORDS = re.findall(r"`([^`\n]+)`", PAGE)
#: files and folders; those with a name to be chosen are examples of nothing
PATHS = [word for word in WORDS if re.fullmatch(r"[\w./]+/(?:\w+\.\w+)?|\w+\.(?:md|toml|yml|txt)", word)]
#: what is looked for in a file that the same paragraph or item names
NAMES = [word for word in WORDS if re.fullmatch(r"[A-Z]{4,}|_?[A-Z]?[a-z]+_[a-z_]+", word)]


@pytest.mark.parametrize("path", dict.fromkeys(PATHS))
def test_what_it_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("name", dict.fromkeys(NAMES))
def test_what_it_says_is_in_a_file_is_there(name: str) -> None:
    sources = (path for folder in ("lightning_mp", "tests") for path in (ROOT / folder).rglob("*.py"))
    files = [*sources, ROOT / "pyproject.toml"]
    assert any(re.search(rf"^\s*(?:def |class )?{name}\b", file.read_text(), re.MULTILINE) for file in files)


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) <= 100
