"""The demo's text: the same every time, capped, and refused with a reason where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_mp.demo.inputs import InputError
from lightning_mp.demo.text import MAX_BYTES, from_path, standard_library


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


def test_the_standard_library_is_real_code_capped_and_always_the_same() -> None:
    text = standard_library()
    assert text == standard_library()
    assert 100_000 < text.size <= MAX_BYTES
    assert any("class OrderedDict" in document for document in text.documents)
    assert "standard library" in text.source


def test_the_standard_library_comes_in_sorted_order_without_tests_and_installed_packages(tmp_path: Path) -> None:
    files = {"b.py": "b", "a/z.py": "a z", "test/x.py": "x", "site-packages/p.py": "p", "a/notes.txt": "n"}
    assert standard_library(_write(tmp_path, files)).documents == ("a z", "b")


def test_a_python_without_sources_is_told_to_use_text(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Got a Python without library sources.*Point --text"):
        standard_library(tmp_path)


def test_a_folder_gives_every_text_file_in_order_and_leaves_out_the_rest(tmp_path: Path) -> None:
    _write(tmp_path, {"b.md": "second", "a/c.txt": "first", ".git/config": "hidden", "blank.txt": " \n", "empty": ""})
    (tmp_path / "data.bin").write_bytes(b"text\0then not")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    assert from_path(tmp_path).documents == ("first", "second")


def test_a_file_gives_its_own_text(tmp_path: Path) -> None:
    path = _write(tmp_path, {"one.txt": "naïve text"}) / "one.txt"
    text = from_path(path)
    assert text.documents == ("naïve text",)
    assert text.source == str(path)
    assert text.size == 11


def test_a_large_file_is_cut_between_characters(tmp_path: Path) -> None:
    # 4 million is no multiple of three, so the cut falls inside a character.
    path = _write(tmp_path, {"large.txt": "€" * (MAX_BYTES // 3 + 10)}) / "large.txt"
    text = from_path(path)
    assert MAX_BYTES - 4 < text.size <= MAX_BYTES
    assert set(text.documents[0]) == {"€"}
    assert "its first 4 MB" in text.source


def test_the_cap_counts_all_files_of_a_folder_together(tmp_path: Path) -> None:
    half = "x" * (MAX_BYTES // 2 + 1)
    text = from_path(_write(tmp_path, {"a": half, "b": half, "c": half}))
    assert [len(document) for document in text.documents] == [MAX_BYTES // 2 + 1, MAX_BYTES // 2 - 1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), (b"", "an empty file"), (b"\xff\xfe\x00", "not readable as UTF-8 text")],
    ids=["missing", "empty", "binary"],
)
def test_a_file_that_is_no_text_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "given"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        from_path(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder without a text file"):
        from_path(tmp_path)
