"""A folder takes another one's place so that a process killed at any moment leaves a whole one, which is found."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_mp.checkpoints import folders


def _write(folder: Path, content: str) -> None:
    folder.mkdir(parents=True)
    (folder / "shard").write_text(content)
    (folder / ".metadata").write_text(content)


def _save(target: Path, content: str) -> None:
    folders.begin(str(target))
    _write(Path(folders.unfinished(str(target))), content)
    folders.finish(str(target))


def _killed_while_saving(target: Path, call: int) -> None:
    """Save from another process, which is killed before its ``call``-th call that moves or deletes a folder."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    calls = 0

    def watch(event: str, arguments: Any) -> None:
        nonlocal calls
        if event in ("os.rename", "shutil.rmtree", "ctypes.call_function") and not str(arguments).count("unfinished'"):
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGKILL)

    folders.begin(str(target))
    _write(Path(folders.unfinished(str(target))), "new")
    sys.addaudithook(watch)
    folders.finish(str(target))
    os._exit(0)


def _content(target: Path) -> str:
    (content,) = {path.read_text() for path in target.iterdir()}
    assert len(list(target.iterdir())) == 2
    return content


@pytest.fixture(params=["exchange", "two renames"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file system that can exchange two names, as those of Linux, or one that cannot, as NFS."""
    if request.param == "two renames":
        monkeypatch.setattr(folders, "exchange", lambda one, other: False)
    return request.param


@pytest.mark.parametrize("call", range(1, 7))
def test_a_kill_leaves_a_whole_checkpoint(tmp_path: Path, kind: str, call: int) -> None:
    target = tmp_path / "last.ckpt"
    _save(target, "old")
    _killed_while_saving(target, call)
    if kind == "exchange":
        assert _content(target) in ("old", "new")
    folders.recover(str(target))
    assert _content(target) in ("old", "new")
    _save(target, "newest")
    assert _content(target) == "newest"
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("call", range(1, 7))
def test_the_next_save_keeps_one_until_it_is_whole(tmp_path: Path, kind: str, call: int) -> None:
    target = tmp_path / "last.ckpt"
    _save(target, "old")
    _killed_while_saving(target, call)
    folders.begin(str(target))
    assert _content(target) in ("old", "new")


def test_the_first_one_is_there_or_is_not(tmp_path: Path, kind: str) -> None:
    for call in range(1, 4):
        target = tmp_path / f"{call}.ckpt"
        _killed_while_saving(target, call)
        folders.recover(str(target))
        assert not target.exists() or _content(target) == "new"
        _save(target, "newer")
        assert _content(target) == "newer"


@pytest.mark.parametrize("there", ["file", "link", "broken link"])
def test_a_folder_takes_the_place_of_a_file_or_of_a_link(tmp_path: Path, kind: str, there: str) -> None:
    target, linked = tmp_path / "last.ckpt", tmp_path / "step=1.ckpt"
    if there == "file":
        target.write_text("a single file")
    else:
        target.symlink_to(linked)
    if there == "link":
        _write(linked, "linked")
    _save(target, "new")
    assert _content(target) == "new"
    assert not target.is_symlink()
    assert not linked.exists() or _content(linked) == "linked"
    assert {path.name for path in tmp_path.iterdir()} <= {"last.ckpt", "step=1.ckpt"}
