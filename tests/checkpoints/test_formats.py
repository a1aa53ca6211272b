"""What lies at a path is told by its file names; where it is no whole checkpoint, one line says what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_mp.checkpoints import CheckpointFormatError, kind_of


def _touch(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


SHARDED = (".metadata", "meta.pt", "__0_0.distcp")
DEEPSPEED = ("latest", "global_step7/mp_rank_00_model_states.pt")


def test_the_three_formats(tmp_path: Path) -> None:
    deepspeed = _touch(tmp_path / "c.ckpt", *DEEPSPEED)
    (deepspeed / "latest").write_text("global_step7\n")
    assert kind_of(_touch(tmp_path, "a.ckpt") / "a.ckpt") == "file"
    assert kind_of(str(_touch(tmp_path / "b.ckpt", *SHARDED))) == "sharded"
    assert kind_of(deepspeed) == "deepspeed"
    assert kind_of(_touch(tmp_path / "d.ckpt", "checkpoint/mp_rank_00_model_states.pt")) == "deepspeed"


@pytest.mark.parametrize(
    ("names", "path", "says"),
    [
        ((), "x.ckpt", "which does not exist"),
        (("a.txt",), "", "is no checkpoint, or not all of one"),
        (SHARDED[1:], "", "is no checkpoint, or not all of one"),
        (DEEPSPEED, "", "its folder '' has no file *_model_states.pt"),
        (DEEPSPEED, "global_step7", "is no checkpoint, or not all of one"),
    ],
)
def test_what_is_none_of_them_is_refused(tmp_path: Path, names: tuple[str, ...], path: str, says: str) -> None:
    place = _touch(tmp_path / "given", *names) / path
    with pytest.raises(CheckpointFormatError) as caught:
        kind_of(place)
    message = str(caught.value)
    assert says in message
    assert repr(str(place)) in message
    assert message.endswith(f"{caught.value.fault.fix[1:]}.")
    assert "\n" not in message
