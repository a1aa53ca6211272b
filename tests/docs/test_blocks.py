"""Every fenced block of the documentation is run by something: README, CONTRIBUTING, the examples' page, the site."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_mp.numerics.dtypes import set_tf32
from support.cells import WHOLE
from support.docs import blocks, commands, pages, text
from support.docs_run import SETUPS, PageRun, Setup

PAGES = [page for page in pages() if blocks(page)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder, a search path, modules and an environment that the page may fill; TF32, which some pages set."""
    restore = set_tf32("highest")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "environ", os.environ)
    before, environment = set(sys.modules), dict(os.environ)
    yield
    restore()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    for name in set(sys.modules) - before:
        home = getattr(sys.modules[name], "__file__", None)
        if home is not None and Path(home).is_relative_to(tmp_path):
            del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)


def _run(page: str, *, all_commands: bool) -> None:
    run = PageRun(page, all_commands=all_commands)
    for block in blocks(page):
        run.block(block)


@pytest.mark.parametrize("page", [page for page in PAGES if not SETUPS.get(page, Setup()).all_slow])
def test_the_blocks_of_a_page_do_what_the_page_says(page: str) -> None:
    _run(page, all_commands=False)


def _has_slow(page: str) -> bool:
    setup = SETUPS.get(page, Setup())
    lines = [" ".join(words[1:]) for block in blocks(page) if block.language == "bash" for words in commands(block)]
    return setup.all_slow or any(re.match(pattern, line) for pattern in setup.slow for line in lines)


#: what the tutorial does, pages of its own and the examples do each
LONGEST = {"docs/tutorial.md": WHOLE}


@pytest.mark.slow
@pytest.mark.parametrize("page", [pytest.param(page, marks=LONGEST.get(page, [])) for page in PAGES if _has_slow(page)])
def test_the_long_commands_of_a_page_run_too(page: str) -> None:
    _run(page, all_commands=True)


def test_pages_are_short_and_so_are_their_lines() -> None:
    lines = {page: text(page).splitlines() for page in pages()}
    assert {page: len(of) for page, of in lines.items() if len(of) > 200} == {}
    # two tables have commands and names of tests; an address cannot be broken
    wide = [
        f"{page}:{number}"
        for page, of in lines.items()
        for number, line in enumerate(of, 1)
        if len(line) > 120
        and "https://" not in line
        and page not in ("examples/README.md", "docs/explanation/sources.md")
    ]
    assert wide == []
    assert sum(len(of) for page, of in lines.items() if page.startswith("docs/")) <= 3800


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith(("docs/reference", "CONTRIBUTING"))])
def test_code_is_as_wide_as_the_site(page: str) -> None:
    """80 columns; what a program prints is as it is."""
    code = [block for block in blocks(page) if block.language in ("python", "bash", "yaml", "json", "diff")]
    assert [(each.place, line) for each in code for line in each.code.splitlines() if len(line) > 80] == []
