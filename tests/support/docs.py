"""The documentation as data: its pages, and the fenced blocks in them."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w-]*)[^\n]*$")
#: a file of the checkout that the site shows in its place
_INCLUDED = re.compile(r'^--8<-- "([\w/.-]+)"$')
#: `# train.py` as the first line says that the block is that file
_FILE = re.compile(r"^# ([\w./-]+\.(?:py|ya?ml|json|sbatch))(?:[ :,].*)?$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: the page it is on (from the root of the checkout), its line there, its language, its text."""

    page: str
    line: int
    language: str
    code: str

    @property
    def place(self) -> str:
        """``docs/index.md:17``."""
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        found = _FILE.match(self.code.partition("\n")[0])
        return found.group(1) if found else None


def pages() -> list[str]:
    """Every page that is read: the site's, and those at the root and beside the examples."""
    beside = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "examples").glob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in (*beside, *sorted(DOCS.rglob("*.md"))) if path.exists()]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    found: list[Block] = []
    lines = iter(enumerate(text(page).splitlines(), start=1))
    for number, line in lines:
        opening = _FENCE.match(line)
        if opening is None:
            continue
        inside: list[str] = []
        for _, below in lines:
            if below.strip() == opening["ticks"]:
                break
            included = _INCLUDED.match(below)
            inside += text(included[1]).splitlines() if included else [below.removeprefix(opening["indent"])]
        else:
            raise ValueError(f"{page}:{number}: the block has no end")
        found.append(Block(page, number, opening["language"], "\n".join(inside) + "\n"))
    return found


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, split into words; comments and blank lines are left out."""
    joined = block.code.replace("\\\n", " ")
    split = (shlex.split(line, comments=True) for line in joined.splitlines())
    return [words for words in split if words]


def sides(block: Block) -> tuple[str, str]:
    lines = block.code.splitlines()
    old = [line[1:] for line in lines if not line.startswith("+")]
    new = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(old) + "\n", "\n".join(new) + "\n"


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page, as rows of cells; the head is the first row."""
    found: list[list[list[str]]] = []
    before = False
    for line in text(page).splitlines():
        row = line.startswith("|")
        if row and not before:
            found.append([])
        if row and not re.fullmatch(r"[|\s:-]+", line):
            found[-1].append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
        before = row
    return found
