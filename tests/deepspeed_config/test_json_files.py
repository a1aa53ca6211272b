"""A DeepSpeed JSON read from a mapping, a file or OmegaConf."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_mp.deepspeed_config.read import load_json as read
from support.deepspeed_json import faults_of, the_fault

SMALL: dict[str, Any] = {"fp16": {"enabled": True, "loss_scale": 0}, "optimizer": {"params": {"betas": [0.9, 0.95]}}}


def file_with(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    return path


FORMS: dict[str, Callable[[Path], Any]] = {
    "dict": lambda _: SMALL,
    "DictConfig": lambda _: OmegaConf.create(SMALL),
    "path": lambda tmp: file_with(tmp, json.dumps(SMALL)),
    "path as a string": lambda tmp: str(file_with(tmp, json.dumps(SMALL))),
    "a byte order mark": lambda tmp: file_with(tmp, "\ufeff" + json.dumps(SMALL)),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_reads_as_the_same_plain_dict(form: Callable[[Path], Any], tmp_path: Path) -> None:
    found = read(form(tmp_path))
    assert found == SMALL
    assert type(found) is dict
    assert type(found["fp16"]) is dict
    assert type(found["optimizer"]["params"]["betas"]) is list
    assert found["fp16"] is not SMALL["fp16"]


BROKEN: list[tuple[str, tuple[str, ...]]] = [
    ('{\n  // the scale\n  "fp16": {}\n}', ("line 2, column 3", "no comments and no last comma")),
    ('{\n  "fp16": {\n}', ("line 3, column 2", "no comments and no last comma")),
    ("fp16: true", ("line 1, column 1", "no comments and no last comma")),
    ("", ("line 1, column 1",)),
    ("[1]", ("with a list in it", "an object")),
    ('{"fp16": {}, "bf16": {"a": 1, "a": 2}, "fp16": {}}', ("'a' twice", "'fp16' twice", "Keep one of them")),
]


@pytest.mark.parametrize(("text", "words"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_file_that_is_no_json_object_says_where_and_why(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = file_with(tmp_path, text)
    message = " ".join(map(str, faults_of(lambda: read(path))))
    assert str(path) in message
    assert all(word in message for word in words)


def test_a_missing_file_and_a_folder_are_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        assert the_fault(lambda path=path: read(path)).given == f"{str(path)!r}, which is no file"


def test_a_config_that_does_not_resolve_is_a_fault_of_the_deepspeed_config() -> None:
    assert "does not resolve" in the_fault(lambda: read(OmegaConf.create({"fp16": {"enabled": "${nowhere}"}}))).given
