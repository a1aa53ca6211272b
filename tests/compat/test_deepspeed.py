"""What DeepSpeed and torch do in silence is said."""

from __future__ import annotations

from pathlib import Path
from threading import Timer

import pytest
from torch.utils import cpp_extension

from lightning_mp.compat import deepspeed


def test_who_waits_for_the_lock_of_a_killed_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed, "LOCKED_SECONDS", 0.0)
    own, lock = cpp_extension.FileBaton, tmp_path / "lock"
    lock.touch()
    with deepspeed.tells_of_locks():
        baton = cpp_extension.FileBaton(str(lock))
        Timer(0.3, lock.unlink).start()
        with pytest.warns(UserWarning, match=r"Waiting for .*/lock: .*delete it"):
            baton.wait()
    assert cpp_extension.FileBaton is own
