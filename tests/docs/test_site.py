"""The site as it is built: without a warning, complete, and loading nothing from another server."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import lightning_mp
from lightning_mp import callbacks
from lightning_mp.record.findings import CODES
from record.report.browser import DESKTOP, PHONE, chromium
from support.cells import WHOLE
from support.docs import ROOT, text

#: elements that load what they point to, and the attribute that points
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src", "video": "src"}
#: of links, only these are fetched to show the page
LINKS = ("stylesheet", "icon", "preload", "modulepreload", "preconnect", "dns-prefetch", "manifest")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning of the build fails it."""
    pytest.importorskip("mkdocs", reason="the extra 'docs' is not installed")
    out = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "true"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return out


class _Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("id"):
            self.ids.add(str(values["id"]))
        loaded = values.get(LOADING.get(tag, ""))
        if loaded and (tag != "link" or set(str(values.get("rel")).split()) & set(LINKS)):
            self.loads.append(loaded)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, _Page]:
    return {str(path.relative_to(site)): _Page(path) for path in site.rglob("*.html")}


def test_every_public_name_has_its_entry_in_the_reference(pages: dict[str, _Page]) -> None:
    ids = set().union(*(page.ids for name, page in pages.items() if name.startswith("reference/")))
    public = [f"lightning_mp.{name}" for name in lightning_mp.__all__]
    public += [f"lightning_mp.callbacks.{name}" for name in callbacks.__all__]
    assert [name for name in public if name not in ids] == []


def test_the_page_of_the_command_line_has_every_command_and_option(site: Path) -> None:
    import typer

    from lightning_mp.cli import app

    page = re.sub(r"<[^>]+>", "", (site / "reference" / "cli.html").read_text(encoding="utf-8"))
    commands: Any = typer.main.get_command(app)
    for name, command in commands.commands.items():
        assert f"lightning-mp {name}" in page
        assert all(option in page for parameter in command.params for option in parameter.opts if option[0] == "-")


@pytest.mark.parametrize("code", CODES.values())
def test_every_code_of_the_doctor_has_its_anchor(code: str, pages: dict[str, _Page]) -> None:
    assert code.lower() in pages["reference/doctor.html"].ids


def test_nothing_is_loaded_from_another_server(site: Path, pages: dict[str, _Page]) -> None:
    foreign = {name: [url for url in page.loads if re.match(r"(?:https?:)?//", url)] for name, page in pages.items()}
    assert {name: urls for name, urls in foreign.items() if urls} == {}
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", sheet.read_text(encoding="utf-8")), sheet


#: of a page: by how many pixels it scrolls sideways, the words of first columns that are broken, the code that is cut
_LOOK = """() => {
  const page = document.documentElement, broken = [], range = document.createRange();
  for (const cell of document.querySelectorAll("article tr > :first-child")) {
    const words = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node; (node = words.nextNode());) for (const word of node.data.matchAll(/\\w+/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) broken.push(word[0]);
    }
  }
  const cut = [...document.querySelectorAll("pre code")].filter((code) => code.scrollWidth > code.clientWidth);
  return [page.scrollWidth - page.clientWidth, broken, cut.map((code) => code.innerText.slice(0, 60))];
}"""


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param(DESKTOP, id="desk", marks=WHOLE), pytest.param(PHONE, id="phone")])
def test_pages_fit_the_screen(site: Path, device: dict[str, Any]) -> None:
    """No page scrolls sideways, no word of a table's first column is broken; on a desk, no code is cut."""
    with chromium() as browser:
        page, found = browser.new_context(**device).new_page(), {}
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            scrolls, broken, cut = page.evaluate(_LOOK)
            found[path.name] = (scrolls, broken, cut if device is DESKTOP else [])
    assert len(found) > 20
    assert {name: seen for name, seen in found.items() if any(seen)} == {}


def test_links_of_the_readme_lead_to_pages() -> None:
    """They are followed in a repository browser, and mkdocs does not see them."""
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text("README.md")):
        assert (ROOT / target).exists(), target
