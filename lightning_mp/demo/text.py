"""Where the demo's text comes from: the running Python's standard library, or what the user points at."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lightning_mp.demo.inputs import InputError

# Enough for hundreds of steps without seeing a token twice on a CPU, and tokenized in two seconds.
MAX_BYTES = 4_000_000
# bytes, in UTF-8
_LONGEST_CHARACTER = 4
# Tests and installed packages are no part of the language's library; encodings and pydoc_data are tables and
# generated prose, which a model learns at once and which would drown the code.
_SKIPPED = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "encodings", "pydoc_data", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class Text:
    """Documents in a fixed order, and one line that says where they are from."""

    documents: tuple[str, ...]
    source: str

    @property
    def size(self) -> int:
        """Bytes of UTF-8."""
        return sum(len(document.encode()) for document in self.documents)


def standard_library(folder: Path | None = None) -> Text:
    """The ``.py`` files of the running Python's standard library, in sorted order, at most ``MAX_BYTES`` of them.

    Raises:
        InputError: this Python has no library sources, as in some trimmed or zipped installations.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = (
        path
        for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).parts)
        if not _SKIPPED.intersection(path.relative_to(folder).parts)
    )
    documents, cut = _read(paths)
    if not documents:
        raise InputError(
            f"a Python without library sources in {folder}", "a file or folder of text", "point --text at one"
        )
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Text(documents, _source(f"Python {version}'s standard library", cut))


def from_path(path: Path) -> Text:
    """A text file, or every text file of a folder in sorted order (hidden ones left out), up to ``MAX_BYTES``.

    Raises:
        InputError: nothing is there, it cannot be read, or no text is in it.
    """
    allowed = "a UTF-8 text file, or a folder with some"
    if not path.exists():
        raise InputError(f"--text {path}, which does not exist", allowed, "check the path, or leave --text out")
    if path.is_dir():
        paths = [found for found in path.rglob("*") if not _hidden(found.relative_to(path))]
        documents, cut = _read(sorted(paths, key=lambda found: found.relative_to(path).parts))
        problem = "a folder without a text file"
    else:
        documents, cut = _read([path])
        problem = "an empty file" if path.is_file() and path.stat().st_size == 0 else "not readable as UTF-8 text"
    if not documents:
        raise InputError(f"--text {path}, {problem}", allowed, "choose another path, or leave --text out")
    return Text(documents, _source(str(path), cut))


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def _source(name: str, cut: bool) -> str:
    return f"{name}, its first {MAX_BYTES / 1e6:.0f} MB" if cut else name


def _read(paths: Iterable[Path]) -> tuple[tuple[str, ...], bool]:
    """What is text among ``paths``, and whether it was cut off at ``MAX_BYTES``."""
    documents: list[str] = []
    left = MAX_BYTES
    for path in paths:
        document = _document(path, left) if path.is_file() else None
        if document and not document.isspace():
            documents.append(document)
            left -= len(document.encode())
        if left < _LONGEST_CHARACTER:
            break
    return tuple(documents), left < _LONGEST_CHARACTER


def _document(path: Path, limit: int) -> str | None:
    """At most ``limit`` bytes of a file as text, or ``None`` where it cannot be read or is not text."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError:
        return None
    if b"\0" in data:
        return None
    cut = len(data) > limit
    try:
        return data[:limit].decode("utf-8")
    except UnicodeDecodeError as error:
        # A cut may fall inside a character; anything else is not UTF-8.
        inside = cut and error.start > limit - _LONGEST_CHARACTER
        return data[: error.start].decode("utf-8") if inside else None
