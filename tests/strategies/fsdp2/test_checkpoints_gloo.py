"""FSDP2 goes on from its own checkpoints: by as many processes, by fewer and by more, from shards and from one file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.comparing import of_training, same
from support.fsdp2_saving import AT, Resume, Save
from support.models import same_weights
from support.ranks import Ranks
from support.sharded import RATE

pytestmark = [pytest.mark.gloo, pytest.mark.slow]

#: optimizers whose groups are in another order than the model's parameters, that keep no state, and usual ones
OPTIMIZERS = ("fused", "groups", "sgd", "momentum")
FORMS = ("shards", "file")
HOSTS = {"shards": ("fsdp2",), "file": ("fsdp2", "ddp")}
CASES = [(optimizer, form, host) for optimizer in OPTIMIZERS for form in FORMS for host in HOSTS[form]]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    """One process."""
    with Ranks(1) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp2")


def _saved(folder: Path, optimizer: str, form: str) -> Save:
    return Save(folder / f"{optimizer} {form}", optimizer, form == "file")


def _goes_on(resumed: dict[str, Any], saved: dict[str, Any]) -> None:
    assert resumed["counts"] == saved["counts"] == (7, 1)
    assert resumed["scales"] == saved["scales"][AT:]
    assert resumed["moments"].keys() == saved["moments"].keys()
    # another number of processes sums the norm that is clipped by in another order
    within = of_training("16-mixed", RATE, steps=8 - AT)
    assert same(resumed["weights"], saved["weights"], within)
    assert same(resumed["moments"], saved["moments"], within)


@pytest.mark.parametrize(("optimizer", "form", "host"), CASES)
def test_as_many_processes_go_on_exactly(ranks: Ranks, folder: Path, optimizer: str, form: str, host: str) -> None:
    """A single file goes on under DDP too, with the state of its optimizer."""
    save = _saved(folder, optimizer, form)
    for saved, resumed in zip(ranks.run(save), ranks.run(Resume(save.folder, host, optimizer)), strict=True):
        assert saved["folder"] == (form == "shards")
        _goes_on(resumed, saved)
        if host == "fsdp2":
            assert same_weights(resumed["weights"], saved["weights"])


@pytest.mark.parametrize(("optimizer", "form", "host"), CASES)
def test_fewer_processes_go_on(ranks: Ranks, alone: Ranks, folder: Path, optimizer: str, form: str, host: str) -> None:
    save = _saved(folder, optimizer, form)
    saved = ranks.run(save)[0]
    _goes_on(alone.run(Resume(save.folder, host, optimizer))[0], saved)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_more_processes_go_on(ranks: Ranks, alone: Ranks, folder: Path, optimizer: str) -> None:
    save = Save(folder / f"{optimizer} one", optimizer)
    (saved,) = alone.run(save)
    for resumed in ranks.run(Resume(save.folder, "fsdp2", optimizer)):
        _goes_on(resumed, saved)
