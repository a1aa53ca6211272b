"""One page a code in ``docs/doctor``; what stands in them is run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.monitor.findings import CODES, Finding

PAGES = Path(__file__).parents[3] / "docs" / "doctor"


def _blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def test_every_code_has_its_page_and_every_page_its_code() -> None:
    assert {page.stem for page in PAGES.glob("LMP*.md")} == set(CODES.values())
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    for name, code in CODES.items():
        assert f"| [{code}]({code}.md) | `{name}` |" in index


@pytest.mark.parametrize("name", CODES)
def test_a_page_shows_the_finding_and_its_repair(name: str) -> None:
    page = PAGES / f"{CODES[name]}.md"
    assert page.read_text(encoding="utf-8").startswith(f"# {CODES[name]} {name}\n")
    sick, mended = _blocks(page, "python")
    (shown,) = _blocks(page, "text")
    namespace: dict[str, Any] = {"__name__": "page"}
    exec(compile(sick, page.name, "exec"), namespace)
    found: list[Finding] = namespace["findings"]
    assert shown.strip() in [f"what: {finding.what}" for finding in found if finding.name == name]
    exec(compile(mended, page.name, "exec"), namespace)
    assert name not in [finding.name for finding in namespace["findings"]]


def test_the_index_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = _blocks(PAGES / "index.md", "text")
    (code,) = _blocks(PAGES / "index.md", "python")
    exec(compile(code, "index.md", "exec"), {})
    printed = capsys.readouterr().out
    assert all(part in printed for part in shown.strip().split("…")[:1])
    assert len(printed.splitlines()) == 1
