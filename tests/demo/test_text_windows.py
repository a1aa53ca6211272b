"""Text as training data: the same every time, capped, and refused with a reason where there is none."""

from pathlib import Path

import pytest
import torch

from lightning_mp.demo import text_windows
from lightning_mp.demo.text_windows import MAX_BYTES, TextWindows, documents_of, encoded
from lightning_mp.errors import PlanError

FOLDER = Path(text_windows.__file__).parent


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder


def test_the_standard_library_comes_sorted_and_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = documents_of(None)
    assert 100_000 < sum(len(document.encode()) for document in real) <= MAX_BYTES
    assert any("class OrderedDict" in document for document in real)
    files = {"b.py": "b", "a/z.py": "a z", "test/x.py": "x", "site-packages/p.py": "p", "a/notes.txt": "n"}
    monkeypatch.setattr(text_windows.sysconfig, "get_path", lambda _: str(_write(tmp_path, files)))
    assert documents_of(None) == ("a z", "b")


def test_a_text_is_cut_between_characters_and_all_files_count_together(tmp_path: Path) -> None:
    # 4 million is no multiple of three, so the cut falls inside a character
    (large,) = documents_of(str(_write(tmp_path, {"large.txt": "€" * (MAX_BYTES // 3 + 10)}) / "large.txt"))
    assert MAX_BYTES - 4 < len(large.encode()) <= MAX_BYTES
    latin = tmp_path / "latin.txt"
    latin.write_bytes("\xe9t\xe9 ".encode("latin-1") * (MAX_BYTES // 3))
    with pytest.raises(PlanError, match="has no UTF-8 text"):  # of whatever length
        TextWindows(str(latin))
    half = "x" * (MAX_BYTES // 2 + 1)
    found = documents_of(str(_write(tmp_path / "more", {"a": half, "b": half, "c": half})))
    assert [len(document) for document in found] == [MAX_BYTES // 2 + 1, MAX_BYTES // 2 - 1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "does not exist"), (b"", "has no UTF-8 text"), (b"\xff\xfe\x00", "has no UTF-8 text")],
    ids=["missing", "empty", "binary"],
)
def test_what_is_no_text_is_refused_with_the_reason(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "given"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=reason):
        TextWindows(str(path))


def test_windows_lie_side_by_side_and_the_end_is_held_out() -> None:
    data = TextWindows(str(FOLDER), vocab=300, context=16, batch_size=4, val_batches=2)
    data.setup("fit")
    tokens = encoded(data._documents, 300)
    assert (tokens.dtype, int(tokens.max())) == (torch.int64, 299)
    held_out = int(tokens.numel() * 0.05)
    val = torch.cat(list(data.val_dataloader()))
    assert torch.equal(val[0], tokens[-held_out:][:17])
    assert torch.equal(val[0, -1:], val[1, :1])
    assert val.shape == (8, 17)
    seen = torch.cat(list(data.train_dataloader()))
    assert seen.shape[0] == (tokens.numel() - held_out - 1) // 16 // 4 * 4
    rows = {tuple(row) for row in tokens[:-held_out].unfold(0, 17, 16).tolist()}
    assert {tuple(row) for row in seen.tolist()} <= rows


def test_a_text_too_short_is_refused(tmp_path: Path) -> None:
    data = TextWindows(str(_write(tmp_path, {"note.txt": "hello world"}) / "note.txt"))
    with pytest.raises(PlanError, match="at least 260 tokens"):
        data.setup("fit")
