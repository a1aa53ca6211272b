"""The recipes of CONTRIBUTING.md name files, and names in them, that are there."""

from __future__ import annotations

import re

from support.docs import ROOT, text

PAGE = text("CONTRIBUTING.md")
WORDS = re.findall(r"`([^`\n]+)`", PAGE)


def test_the_files_and_folders_that_it_names_are_there() -> None:
    paths = {word for word in WORDS if re.fullmatch(r"[\w./]+/(?:\w+\.\w+)?|\w+\.(?:md|toml|yml|txt)", word)}
    assert len(paths) > 20
    missing = [path for path in paths if not any((ROOT / below / path).exists() for below in ("", "lightning_mp"))]
    assert missing == []


def test_what_it_sends_one_to_in_them_is_there() -> None:
    names = {word for word in WORDS if re.fullmatch(r"[A-Z]{4,}|_?[a-z]+_[a-z_]+", word)}
    assert len(names) >= 6
    sources = [path for folder in ("lightning_mp", "tests") for path in (ROOT / folder).rglob("*.py")]
    whole = "\n".join(path.read_text(encoding="utf-8") for path in (*sources, ROOT / "pyproject.toml"))
    assert [name for name in names if not re.search(rf"^\s*(?:def )?{name}\b", whole, re.MULTILINE)] == []


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) <= 80
