"""The site as it is built: without a warning, complete, and loading nothing from another server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import lightning_mp
from lightning_mp import callbacks
from lightning_mp.monitor.findings import CODES
from support.docs import DOCS, ROOT, text

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
    """The ids of a page, and what it loads."""

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


def test_the_list_of_public_names_is_complete() -> None:
    page = text("docs/reference/index.md")
    for name in (*lightning_mp.__all__, *callbacks.__all__):
        assert f"[`{name}`](" in page, name


def test_a_page_of_the_reference_shows_arguments_fields_and_what_is_raised(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "reference" / "plan.html").read_text(encoding="utf-8"))
    for shown in ("module patterns and the dtype each is stored and run in", "growth_interval", "Raises:", "PlanError"):
        assert shown in page
    assert ":class:" not in page
    settings = (site / "reference" / "callbacks.html").read_text(encoding="utf-8")
    assert "skips in a row; warm-up under a scale of 65,536" in settings


@pytest.mark.parametrize("code", CODES.values())
def test_every_code_of_the_doctor_has_its_page(code: str, pages: dict[str, _Page]) -> None:
    assert f"doctor/{code}.html" in pages


def test_every_page_is_in_the_table_of_contents_once() -> None:
    class Loader(yaml.SafeLoader):
        """mkdocs.yml has tags that only mkdocs knows."""

    Loader.add_multi_constructor("!", lambda *_: None)
    Loader.add_multi_constructor("tag:", lambda *_: None)
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    listed = re.findall(r"[\w/-]+\.md", str(config["nav"]))
    codes = [f"doctor/{code}.md" for code in CODES.values()]  # the doctor's page lists them
    assert sorted(listed + codes) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    assert all(f"]({code}.md)" in text("docs/doctor/index.md") for code in CODES.values())


def test_nothing_is_loaded_from_another_server(site: Path, pages: dict[str, _Page]) -> None:
    foreign = {name: [url for url in page.loads if re.match(r"(?:https?:)?//", url)] for name, page in pages.items()}
    assert {name: urls for name, urls in foreign.items() if urls} == {}
    for sheet in site.rglob("*.css"):
        assert not re.search(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""", sheet.read_text(encoding="utf-8")), sheet


def test_the_search_knows_the_pages(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    for wanted in ("My loss scale keeps falling", "LMP012", "GradScalerKwargs", "Attempting to unscale FP16 gradients"):
        assert wanted in index


def test_the_search_works_in_a_page_that_was_opened_from_a_folder(site: Path) -> None:
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = ")
    assert "javascripts/iframe-worker.js" in (site / "how-to" / "index.html").read_text(encoding="utf-8")


def test_links_of_the_readme_lead_to_pages() -> None:
    """They are followed in a repository browser, and mkdocs does not see them."""
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text("README.md")):
        assert (ROOT / target).exists(), target


#: what users of this field complain about, each with words that it is looked for by
COMPLAINTS = (
    "schedule", "EMA", "fused", "manual optimization", "fp16 with FSDP2|FSDP2.*fp16", "pins vanish", "masters",
    "eval mode", "LoRA", "emulated", "unscale FP16", "NaN", "which module", "logging", "TF32", "fp8",
    "custom loss scaler", "activation checkpointing exists for FSDP only", "cache", "norm differs",
)  # fmt: skip


@pytest.mark.parametrize("words", COMPLAINTS)
def test_what_users_complain_about_is_found_by_symptom(words: str) -> None:
    assert re.search(words, " ".join(text(str(path.relative_to(ROOT))) for path in (DOCS / "how-to").glob("*.md")))
